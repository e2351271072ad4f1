"""Records as the benchmark keeps them, of numbers that are chosen."""

from collections.abc import Sequence
from typing import Any

from bcfl.benchmark.tasks import all_tasks


def made_up(
    task: str,
    contestant: str,
    nll: Sequence[float | None],
    *,
    model: str = "linear",
    draw: int = 0,
    tuned: bool = False,
) -> dict[str, Any]:
    """A record of sites with these losses."""
    count = len(nll)
    return {
        "task": task, "contestant": contestant, "model": model, "draw": draw, "tuned": tuned,
        "newcomers": False, "options": {},
        "setting": {"rounds": 30, "local_steps": 10, "learning_rate": 0.05, "batch_size": 32},
        "sites": [f"site {index}" for index in range(count)], "rows": [10 + index for index in range(count)],
        "test_rows": [10] * count, "nll": list(nll), all_tasks()[task].measure: [0.5] * count,
        "calibration": {"ece": 0.1}, "membership": None, "seconds": 1.5, "choosing_seconds": 0.0, "local_steps": 300,
        "bytes_down": 1000, "bytes_up": 1000,
    }  # fmt: skip
