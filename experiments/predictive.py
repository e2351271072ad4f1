"""Each client's best model beside its predictive mixture, for all finished runs of a folder, by scoring only.

python experiments/predictive.py RUNS_FOLDER OUT.json

Where a run kept validation data apart (data.validation), the beliefs' prior precision is chosen on them; else 1000.
What is printed is the mixture minus the best model, with a 95 % confidence interval over seeds (Student's t).
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from runs import runs_and_file
from tables import interval, table

import bcfl
from bcfl.files import write_atomically
from bcfl.predict.predictors import Spread
from bcfl.runs.evaluation import evaluate

KINDS = ("mean", "last_layer", "samples")
SAMPLES = 8


def measure(path: Path) -> list[dict[str, Any]]:
    result = bcfl.load(path)
    choose = bool(result.config.data.validation)
    own = {"data": result.config.data.name, "rounds": result.config.experiment.rounds, "ari": result.history[-1]["ari"]}
    found = []
    for kind in KINDS:
        spread = Spread(kind, SAMPLES)  # type: ignore[arg-type]
        found.append({**own, **evaluate(result, spread, choose=choose and kind != "mean")})
    return found


def uncertainty(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The predictive mixture minus each client's best model, with confidence intervals over seeds."""
    rows: dict[tuple[str, int, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        rows[record["data"], record["rounds"], record["method"], record["beliefs"]].append(record)
    lines = []
    for (data, rounds, method, beliefs), runs in sorted(rows.items()):
        best = [f"{fmean(run['point'][key] for run in runs):.4f}" for key in ("nll", "ece")]
        change = [
            interval([run["mixture"][key] - run["point"][key] for run in runs])
            for key in ("nll", "ece", "brier", "accuracy")
        ]
        lines.append([f"{data}, {rounds} rounds", method, beliefs, *best, *change, str(len(runs))])
    columns = ["data", "method", "beliefs", "NLL, best model", "ECE, best model", "Δ NLL", "Δ ECE", "Δ Brier"]
    columns += ["Δ accuracy", "seeds"]
    if not lines:
        return []
    note = (
        "Each client's predictive mixture minus its best model, on test data, with 95 % confidence intervals over "
        "seeds (Student's t); below zero is better, but for accuracy (docs/uncertainty.md)."
    )
    return [note, "", *table(columns, lines)]


def main() -> None:
    torch.set_num_threads(1)
    runs, out = runs_and_file(__doc__)
    records = []
    for path in runs:
        records += measure(path)
        write_atomically(out, (json.dumps(records) + "\n").encode())  # what is done is not lost
    print("\n".join(uncertainty(records)))


if __name__ == "__main__":
    main()
