"""Gather finished runs into results/ (one small file each), write RESULTS.md from them and draw its curves.

python experiments/collect.py RUNS_FOLDER...   take over the finished runs of these folders, then write RESULTS.md
python experiments/collect.py                  write RESULTS.md from what results/ holds
"""

import json
from pathlib import Path
from typing import Any

from draw_results import draw_table1
from measured import read_paper, read_records
from results_page import results_page, write_rows
from runs import finished, parser_for

from bcfl.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
PER_ROUND = ("accuracy", "macro_f1", "nll", "ece", "ari", "changes")
WORK = ("local_steps", "scored_examples", "parameters_down", "parameters_up", "scalars_up")


def compact(run: Path) -> dict[str, Any]:
    """What is kept of a run: its settings, its figures and what it cost by round, and how long it took."""
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    seconds = [json.loads(line)["seconds"] for line in (run / "timings.jsonl").read_text().splitlines()]
    return {
        "config": json.loads((run / "config.json").read_text()),
        "environment": json.loads((run / "environment.json").read_text()),
        "split": json.loads((run / "manifest.json").read_text())["sha256"],
        "result": json.loads((run / "result.json").read_text()),
        "by_round": {key: [_short(record.get(key)) for record in rounds[1:]] for key in PER_ROUND},
        "work_by_round": {key: [record["work"][key] for record in rounds] for key in WORK},  # round 0, warm-up, first
        "seconds": round(sum(seconds), 1),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def write_page(root: Path) -> None:
    records = read_records(root)
    write_atomically(root / "RESULTS.md", results_page(records, read_paper(root), root).encode())
    write_rows(records, root / "results/rows.csv")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("runs_folder", nargs="*", type=Path, help="a folder of runs, as `bcfl sweep --out` leaves it")
    taken = [run for folder in parser.parse_args().runs_folder for run in finished(folder)]
    for run in taken:
        text = json.dumps(compact(run), separators=(",", ":"))
        write_atomically(ROOT / "results" / f"{run.name}.json", (text + "\n").encode())
    write_page(ROOT)
    draw_table1(ROOT)
    print(
        f"took over {len(taken)} finished runs; wrote RESULTS.md and results/rows.csv, and drew the curves of table 1"
    )


if __name__ == "__main__":
    main()
