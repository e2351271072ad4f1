"""Finished runs tested with other BatchNorm statistics than the learned ones: as the published code does, and honestly.

python experiments/batch_statistics.py RUNS_FOLDER OUT.json

For every finished run with BatchNorm in its model: accuracy and macro F1 of its last models with the statistics that
were learned, as in its own results; with those of each batch of a client's test examples, in a random order, as the
published code tests; and with those of the client's own training examples, which every client has.
"""

import json
from pathlib import Path
from typing import Any

import torch
from measured import MEASURES, clusters_of, problem_of
from runs import runs_and_file
from torch import Tensor, nn

import bcfl
from bcfl.client.score import batch_norms
from bcfl.data.partition import FederatedData
from bcfl.files import write_atomically
from bcfl.likelihood.measures import evaluate
from bcfl.predict.metrics import summarise
from bcfl.randomness import generator
from bcfl.runs.problem import load_data

WAYS = ("learned", "of_batches", "of_training")


def measure(path: Path) -> dict[str, Any] | None:
    """All tests of one run; nothing for a model without BatchNorm."""
    result = bcfl.load(path)
    if not batch_norms(result.predictor(0)):
        return None
    data, config = load_data(result.config), {"config": result.config.as_dict()}
    size, seed = result.config.training.batch_size, result.config.experiment.seed
    own = {"problem": problem_of(config), "clusters": clusters_of(config)}
    own |= {"method": result.config.method["name"], "seed": seed}
    return own | {way: _tested(result, data, size, seed, way) for way in WAYS}


def _tested(result: bcfl.Result, data: FederatedData, size: int, seed: int, way: str) -> dict[str, float]:
    evaluations = []
    for client, rows in enumerate(data.test_of):
        own = data.x_train[data.train_of[client]] if way == "of_training" else None
        module = result.predictor(client, statistics_of=own)
        for norm in batch_norms(module):
            norm.train(way == "of_batches")
        order = rows[torch.randperm(len(rows), generator=generator(seed, "test", client))]
        batches = order.tensor_split(-(-len(order) // size))  # of nearly one size: none with a single example
        log_p = torch.cat([_log_p(module, data.x_test[batch]) for batch in batches])
        evaluations.append(evaluate(log_p, data.y_test[order], log_p.shape[1]))
    found = summarise(evaluations)
    return {key: 100 * found[key] for key in MEASURES}


@torch.no_grad()
def _log_p(module: nn.Module, x: Tensor) -> Tensor:
    scores: Tensor = module(x)
    return scores.log_softmax(1)


def main() -> None:
    torch.set_num_threads(1)
    runs, out = runs_and_file(__doc__)
    records: list[dict[str, Any]] = []
    for path in runs:
        if record := measure(path):
            records.append(record)
            write_atomically(out, (json.dumps(records) + "\n").encode())  # what is done is not lost
            print(path.name, *(record[way] for way in WAYS), flush=True)


if __name__ == "__main__":
    main()
