"""Finished runs tested with other BatchNorm statistics than the learned ones: as the published code does, and honestly.

python experiments/batch_statistics.py RUNS_FOLDER OUT.json

For every finished run with BatchNorm in its model: accuracy and macro F1 of its last models with the statistics that
were learned, as in its own results; with those of each batch of a client's test examples, in a random order, as the
published code tests; and with those of the client's own training examples, which every client has.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measured import MEASURES, Paper, clusters_of, paper_key, problem_of
from runs import runs_and_file
from tables import show, table
from torch import Tensor, nn

import bcfl
from bcfl.client.trainer import batch_norms, evaluate
from bcfl.data.partition import FederatedData
from bcfl.files import write_atomically
from bcfl.predict.metrics import summarise
from bcfl.randomness import generator
from bcfl.runs.problem import prepare

NOTE = (
    "The published code never leaves training mode, so that BatchNorm, when it tests, takes its statistics from the "
    "test examples of a client that are at hand, up to 32 at a time. Where clients hold few classes that fits a model "
    "to the client, but it is no prediction for one example: it hangs on the others. All other tables here are by the "
    "statistics that were learned. These are the same last models, tested in both ways "
    "(`experiments/batch_statistics.py`), of the runs that were still at hand when this was looked into. A client can "
    "have the same without looking at test examples: *own* are the statistics of its own training examples, "
    "`result.predictor(client, statistics_of=x)`, for the runs that were made again for it. For the "
    "other tables with BatchNorm, label(4,10,0.1) among them, none of this was measured."
)
WAYS = ("learned", "of_batches", "of_training")


def measure(path: Path) -> dict[str, Any] | None:
    """All tests of one run; nothing for a model without BatchNorm."""
    result = bcfl.load(path)
    if not batch_norms(result.predictor(0)):
        return None
    data, config = prepare(result.config).data, {"config": result.config.as_dict()}
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


def pointer(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where what was tested in both ways stands, for whoever has read only how it does by learned statistics."""
    tested = dict.fromkeys(", ".join(record["problem"]) for record in records)
    where = "Also [tested as the published code tests](#tested-as-the-published-code-tests), which makes a difference"
    return [f"{where}: {'; '.join(tested)}.", ""] if tested else []


def as_published(records: Sequence[Mapping[str, Any]], paper: Paper) -> list[str]:
    """A row for each method, beside the paper's, in Markdown."""
    rows: dict[tuple[tuple[str, str], int | None, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        rows[tuple(record["problem"]), record["clusters"], record["method"]].append(record)
    lines = []
    for (problem, clusters, method), runs in rows.items():
        # A method without clusters stands beside the K with which the paper runs most methods.
        keys = [key for key in paper if key[:2] == paper_key(problem, None)[:2] and clusters in (None, key[2])]
        printed = paper[max(keys, key=lambda key: len(paper[key]))] if keys else {}
        cells = [", ".join(problem), method]
        for key in MEASURES:
            for way in WAYS:  # what was measured before there was the last one lacks it
                found = [run[way][key] for run in runs if way in run]
                cells.append(show(found) if len(found) == len(runs) else "")
            cells.append(str(printed.get(method, {}).get(key, "")))
        place = list(printed).index(method) if method in printed else len(printed)
        lines.append((problem, place, [*cells, str(len(runs))]))
    columns = ["data", "method"]
    columns += [title for name in MEASURES.values() for title in (name, f"{name}, by batches", "own", "paper")]
    head = ["## Tested as the published code tests", "", NOTE, ""]
    return [*head, *table([*columns, "seeds"], [cells for *_, cells in sorted(lines)]), ""] if lines else []


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
