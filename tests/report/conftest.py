"""Run folders to look at: a small real one, and made-up ones of any size."""

from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_runs import write_run

from bcfl.runs.loop import start
from bcfl.runs.settings import load_config


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[..., Path]:
    """Write a made-up run folder: made_up(name, clients=…, rounds=…, …)."""
    return lambda name="run", **options: write_run(tmp_path / name, **options)


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "real"
    start(load_config(None, ["experiment.rounds=4", "data.partition='feature(4,2)'"]), path, num_workers=1)
    return path
