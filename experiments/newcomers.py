"""How many examples place a newcomer, and are the stated probabilities right: from finished runs, by scoring only.

python experiments/newcomers.py RUNS_FOLDER OUT.json     for the runs of experiments/newcomers-*.toml

The newcomers are the clients that a run never saw (experiment.joins beyond its end); where there are none, every client
is taken as one, by its test examples. Each is asked many times, with a handful of random examples of its own; who has
fewer than two of the largest handfuls is left out: one half is for placing it, the other for its predictions.
"""

import json
from pathlib import Path
from typing import Any

import torch
from runs import runs_and_file
from torch import Tensor

import bcfl
from bcfl.association.hypotheses import renumbering
from bcfl.client.examples import Examples, pool
from bcfl.client.score import log_probabilities
from bcfl.federation import Hypotheses
from bcfl.files import write_atomically
from bcfl.likelihood.measures import NUM_BINS, calibration_table
from bcfl.model.flat import FlatModel, build
from bcfl.predict.metrics import agreement, calibration_error
from bcfl.predict.mixtures import belief_shares, cluster_log_prior, newcomer_posterior
from bcfl.runs.problem import load_data
from bcfl.runs.result import Result

SIZES = (1, 2, 4, 8, 16, 32, 64)  # examples of a newcomer
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)  # log-likelihoods are divided by n^power: 0 is "none", 1 is "per_example"
NUMBERS = (2.0, 4.0, 8.0, 16.0)  # … or by a number
HANDFULS = 100  # of each size, from each newcomer
MOST = 400  # examples of a newcomer that are scored


def newcomers(result: Result) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Per newcomer, log p(class | x) of its examples under each belief, their labels, and the cluster of its group."""
    data = load_data(result.config)
    assert data.group is not None
    away = [c for c, first in result.config.experiment.joins if first > result.config.experiment.rounds]
    known = [c for c in range(data.num_clients) if c not in away]
    model = FlatModel(build(result.factory, 0, "newcomers"))
    values, labels, clusters = [], [], []
    own, x, y = (data.train_of, data.x_train, data.y_train) if away else (data.test_of, data.x_test, data.y_test)
    for client in (c for c in away or known if len(own[c]) >= 2 * max(SIZES)):
        rows = own[client][torch.randperm(len(own[client]), generator=torch.Generator().manual_seed(client))[:MOST]]
        pooled, images = pool(x[rows])
        examples = Examples(pooled, y[rows], torch.arange(len(rows)), images)
        values.append(log_probabilities(model, result.state.hypotheses.models.mean, examples, torch.arange(len(rows))))
        labels.append(y[rows])
        members = [c for c in known if data.group[c] == data.group[client] and c != client]
        placed = result.assignment[members]
        clusters.append(int(torch.bincount(placed[placed >= 0]).argmax()))
    if not clusters:
        raise SystemExit(f"{result.path}: no client has the {2 * max(SIZES)} examples that a newcomer needs here")
    return values, labels, clusters  # [(belief, example, class)], [(example,)], [cluster]


def handfuls(values: list[Tensor], labels: list[Tensor], size: int) -> Tensor:
    """The log-likelihood of many random handfuls of each newcomer's examples, under each belief."""
    rows = []
    for client, (log_p, y) in enumerate(zip(values, labels, strict=True)):
        draws = torch.Generator().manual_seed(1000 * size + client)
        half = len(y) // 2  # the other half is what it will have to predict
        chosen = torch.stack([torch.randperm(half, generator=draws)[:size] for _ in range(HANDFULS)])
        own = log_p.double()[:, torch.arange(len(y)), y]  # (belief, example)
        rows.append(own[:, chosen].sum(2).T)
    return torch.cat(rows)  # (newcomer × handful, belief)


def posterior(state: Hypotheses, score: Tensor) -> Tensor:
    """How likely each handful belongs to each cluster under each hypothesis."""  # (handful, hypothesis, cluster)
    log_prior = cluster_log_prior(state.assignment, state.model_of, "uniform")
    return newcomer_posterior(score, state.model_of, state.log_weight, log_prior)


def predictions(result: Result, values: list[Tensor], labels: list[Tensor], score: Tensor) -> dict[str, float]:
    """NLL and ECE on the newcomers' other examples: of the mixture, and of the single most likely model."""
    state = result.state.hypotheses
    shares = torch.stack([belief_shares(one, state.model_of, len(state.models)) for one in posterior(state, score)])
    found: dict[str, float] = {}
    for name, weight in (("mixture", shares), ("best", (shares == shares.amax(1, keepdim=True)).double())):
        nll, table = [], torch.zeros(NUM_BINS, 3, dtype=torch.float64)
        for client, (log_p, y) in enumerate(zip(values, labels, strict=True)):
            others = slice(len(y) // 2, None)
            own = weight[client * HANDFULS : (client + 1) * HANDFULS]
            p = torch.einsum("hb,bec->hec", own / own.sum(1, keepdim=True), log_p[:, others].double().exp())
            confidence, guess = p.max(2)
            nll.append(-p[:, torch.arange(p.shape[1]), y[others]].log().mean())
            table += calibration_table(confidence.flatten(), (guess == y[others]).flatten())
        found |= {f"{name}_nll": float(torch.stack(nll).mean()), f"{name}_ece": calibration_error(table)}
    return found


def quality(result: Result, score: Tensor, true: Tensor) -> dict[str, float]:
    """How often the most likely cluster is the true one, and how right the probabilities are."""
    state, joint = result.state.hypotheses, posterior(result.state.hypotheses, score)
    names = renumbering(state.assignment, state.num_clusters).expand_as(joint)
    p = torch.zeros_like(joint).scatter(2, names, joint).sum(1)
    confidence, guess = p.max(1)
    return {
        "accuracy": float((guess == true).double().mean()),
        "confidence": float(confidence.mean()),
        "ece": calibration_error(calibration_table(confidence, guess == true)),
        "nll": -float(p.gather(1, true[:, None]).clamp(min=1e-12).log().mean()),
        "sure_and_wrong": float(((confidence > 0.99) & (guess != true)).double().mean()),
    }


def measure(path: Path) -> dict[str, Any]:
    result = bcfl.load(path)
    values, labels, clusters = newcomers(result)
    table, predicted, true = [], [], torch.tensor(clusters).repeat_interleave(HANDFULS)
    for size in SIZES:
        score = handfuls(values, labels, size)
        predicted.append({"examples": size, **predictions(result, values, labels, score)})
        divisors = {f"n^{power:g}": size**power for power in POWERS} | {f"{number:g}": number for number in NUMBERS}
        for name, divisor in divisors.items():
            table.append({"examples": size, "temperature": name, **quality(result, score / divisor, true)})
    settings = result.config
    return {
        "data": settings.data.name,
        "method": settings.method["name"],
        "seed": settings.experiment.seed,
        "rounds": settings.experiment.rounds,
        "newcomers": len(clusters),
        "held_out": bool(settings.experiment.joins),
        "ari": None if result.group is None else agreement(result.assignment, result.group),
        "table": table,
        "predictions": predicted,
    }


def main() -> None:
    torch.set_num_threads(1)
    runs, out = runs_and_file(__doc__)
    records = [measure(path) for path in runs]
    write_atomically(out, (json.dumps(records, separators=(",", ":")) + "\n").encode())
    for record in records:
        print(f"{record['data']} {record['method']} seed {record['seed']}, {record['newcomers']} newcomers, "
              f"held out: {record['held_out']}")  # fmt: skip
        for row in [*record["table"], *record["predictions"]]:
            print("  " + "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
