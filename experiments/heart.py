"""The four hospitals of UCI Heart Disease by FLamby's rule: each hospital's accuracy, and their mean with its interval.

    python experiments/heart.py            writes results/heart/heart.json (half a minute)

An interval is of the test patients' chance alone: that of a mean of four shares, each of its own hospital's patients.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

import bcfl
from bcfl.data.heart import heart

SEEDS = range(5)
ROUNDS = 30
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "each alone": ("local", {}),
    "FedAvg": ("fedavg", {}),
    "BCFL-MH-3, 2 clusters": ("bcfl-mh-3", {"num_clusters": 2}),
    "BCFL-soft, 2 clusters": ("bcfl-soft", {"num_clusters": 2}),
}
OUT = Path(__file__).parent.parent / "results" / "heart" / "heart.json"


def main() -> None:
    table = heart(None)
    tested = np.array([len(one["y_test"]) for one in table.values()])
    found = {"pooled logistic regression": _told(np.array([_pooled(table)]), tested)}
    for title, (method, options) in METHODS.items():
        accuracy = []
        for seed in SEEDS:
            result = bcfl.train("linear", table, method=method, rounds=ROUNDS, seed=seed, progress=False, **options)
            accuracy.append([record["accuracy"] for record in result.by_site()])
        found[title] = _told(np.array(accuracy), tested)
    record = {"hospitals": list(table), "tested": tested.tolist(), "rounds": ROUNDS, "seeds": len(SEEDS),
              "methods": found}  # fmt: skip
    OUT.write_text(json.dumps(record, indent=2) + "\n")
    for title, one in found.items():
        print(f"{title:28s} {one['mean']:.3f} ± {one['interval']:.3f}", [round(share, 3) for share in one["accuracy"]])


def _pooled(table: bcfl.Table) -> list[float]:
    x, y = (np.concatenate([one[key].numpy() for one in table.values()]) for key in ("x", "y"))
    model = LogisticRegression(max_iter=1000).fit(x, y)
    return [float(model.score(one["x_test"].numpy(), one["y_test"].numpy())) for one in table.values()]


def _told(accuracy: Any, tested: Any) -> dict[str, Any]:
    """Each hospital's accuracy over the seeds, their mean, and half the width of its 95 % interval."""
    share = accuracy.mean(0)
    error = math.sqrt(float((share * (1 - share) / tested).sum())) / len(share)
    return {"accuracy": share.tolist(), "mean": float(share.mean()), "interval": 1.96 * error}


if __name__ == "__main__":
    main()
