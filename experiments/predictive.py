"""Each client's best model beside its predictive mixture, for all finished runs of a folder, by scoring only.

python experiments/predictive.py RUNS_FOLDER OUT.json

Where a run kept validation data apart (data.validation), the beliefs' prior precision is chosen on them; else 1000.
What is printed is the mixture minus the best model, with a 95 % confidence interval over seeds (Student's t).
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from scipy.stats import t

import bcfl
from bcfl.experiment.evaluation import evaluate
from bcfl.experiment.prediction import Spread

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


def interval(values: list[float]) -> str:
    """The mean with its 95 % confidence interval; of one value, the value."""
    if len(values) < 2:
        return f"{fmean(values):+.4f} (one seed)"
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):+.4f} ± {half:.4f}"


def table(records: list[dict[str, Any]]) -> str:
    by_kind = defaultdict(list)
    for record in records:
        by_kind[record["method"], record["beliefs"]].append(record)
    lines = [
        "| method | beliefs | prior precision | NLL, best model | ECE, best model "
        "| Δ NLL | Δ ECE | Δ Brier | Δ accuracy | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (method, kind), runs in by_kind.items():
        best = [f"{fmean(run['point'][key] for run in runs):.4f}" for key in ("nll", "ece")]
        change = [
            interval([run["mixture"][key] - run["point"][key] for run in runs])
            for key in ("nll", "ece", "brier", "accuracy")
        ]
        chosen = ", ".join(sorted({f"{run['prior_precision']}" for run in runs})) if kind != "mean" else ""
        lines.append(f"| {method} | {kind} | {chosen} | {' | '.join([*best, *change])} | {len(runs)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    records = []
    for path in sorted(folder.glob("*/result.json")):
        records += measure(path.parent)
        out.write_text(json.dumps(records) + "\n")  # what is done is not lost
    print(table(records))


if __name__ == "__main__":
    main()
