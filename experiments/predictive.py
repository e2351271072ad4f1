"""Each client's best model beside its predictive mixture, for all finished runs of a folder, by scoring only.

python experiments/predictive.py RUNS_FOLDER OUT.json

Where a run kept validation data apart (data.validation), the beliefs' prior precision is chosen on them; else 1000.
What is printed is the mixture minus the best model, with a 95 % confidence interval over seeds (Student's t).
"""

import json
from pathlib import Path
from typing import Any

import torch
from beyond_page import uncertainty
from runs import runs_and_file

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
