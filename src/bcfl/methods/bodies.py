"""Networks for several numbers of clusters, learned side by side until held-out examples say which is best."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bcfl.association.hypotheses import Branches
from bcfl.association.k_means import k_means
from bcfl.belief.gaussian import Gaussian, flat
from bcfl.federation import Clients, Hypotheses, Jobs
from bcfl.methods.candidates import ALONE, Candidate
from bcfl.methods.steps import Fuse, distinct_groups, distinct_results, train_groups
from bcfl.randomness import stream_seed

FORGETTING = 0.5  # as bcfl-g has it
WARM_UP_ROUNDS = 2  # as -w has it


def first_bodies(clients: Clients, candidates: Sequence[Candidate], held_out: float) -> Hypotheses:
    """A row of clusters for each candidate: clients train alone for a while, and are grouped by their models."""
    start, num_clients = clients.draw_model(0, 0), len(clients.present)
    present = clients.present.nonzero()[:, 0]
    steps = WARM_UP_ROUNDS * clients.local_steps
    jobs = Jobs(torch.zeros_like(present), present, num_steps=steps, held_out=held_out)
    answers = zip(present.tolist(), clients.fit(flat(start[None]), jobs), strict=True)
    arrived = {client: posterior.mean for client, posterior in answers if posterior is not None}
    who = torch.tensor(list(arrived), dtype=torch.int64)
    trained = torch.stack(list(arrived.values())) if arrived else start[None]
    weight = clients.num_examples[who] if arrived else torch.ones(1, dtype=torch.float64)
    models, rows, assignments = list[Tensor](), list[list[int]](), list[Tensor]()
    for candidate in candidates:
        assignment = torch.full((num_clients,), -1)
        if candidate == ALONE:
            own = start.repeat(num_clients, 1)
            own[who] = trained if arrived else own[who]
            assignment = torch.arange(num_clients)
        else:
            own = start.repeat(candidate.num_clusters, 1)
            labels = _labels(trained, weight, candidate.num_clusters, clients) if arrived else who
            for cluster in labels.unique().tolist():
                part = torch.where(labels == cluster, weight, 0.0)
                own[cluster] = (part / part.sum()).to(trained.dtype) @ trained
            assignment[who] = labels
        rows.append(list(range(len(models), len(models) + len(own))))
        models += list(own)
        assignments.append(assignment)
    return _rows(torch.stack(models), rows, torch.stack(assignments))


def _labels(trained: Tensor, weight: Tensor, num_clusters: int, clients: Clients) -> Tensor:
    if num_clusters == 1:
        return torch.zeros(len(trained), dtype=torch.int64)
    points = trained[:, : clients.num_parameters]
    return k_means(points, weight, num_clusters, stream_seed(clients.seed, "warm-up"))


def _rows(models: Tensor, rows: Sequence[Sequence[int]], assignment: Tensor) -> Hypotheses:
    width, count = max(map(len, rows)), len(rows)
    return Hypotheses(
        models=flat(models),
        model_of=torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows]),
        log_weight=torch.full((count,), -math.log(count), dtype=torch.float64),
        assignment=assignment,
        parent_of=torch.arange(len(models)),
        family=torch.arange(count),
    )


def wanted_by(bodies: Hypotheses, candidates: Sequence[Candidate]) -> Tensor:
    """Which clients score which model: all of them the clusters', and each only its own."""  # (client, model) bool
    num_clients = bodies.assignment.shape[1]
    wanted = torch.zeros(num_clients, len(bodies.models), dtype=torch.bool)
    for row, candidate in zip(bodies.model_of, candidates, strict=True):
        if candidate == ALONE:
            wanted[torch.arange(num_clients), row[:num_clients]] = True
        else:
            wanted[:, row[row >= 0]] = True
    return wanted


def train_bodies(
    bodies: Hypotheses, candidates: Sequence[Candidate], clients: Clients, held_out: float, max_examples: int | None
) -> tuple[Hypotheses, Tensor]:
    """Every candidate a round on, and how likely the examples held out were beforehand; NaN where nobody knows.

    A client is in the cluster that explains best what it trains on: the examples held out have no say.
    """  # (client, candidate)
    wanted = wanted_by(bodies, candidates)
    if held_out:
        told = clients.score(bodies.models.mean, None, wanted=wanted)
        aside = clients.score(bodies.models.mean, None, held_out, wanted=wanted)
        left = told - aside
        left = torch.where((left == 0).all(1, keepdim=True), told, left)  # a client too small to hold anything out
    else:
        left = clients.score(bodies.models.mean, max_examples, wanted=wanted)
        aside = torch.full_like(left, torch.nan)
    present = clients.present
    assignment, said = bodies.assignment.clone(), list[Tensor]()
    for place, (row, candidate) in enumerate(zip(bodies.model_of, candidates, strict=True)):
        if candidate != ALONE:
            scores = torch.where(row >= 0, left[:, row.clamp(min=0)], -torch.inf)
            assignment[place, present] = scores[present].nan_to_num(-torch.inf).argmax(1)
        own = row[assignment[place].clamp(min=0)]
        said.append(torch.where(present, aside.gather(1, own[:, None])[:, 0], torch.nan))
    kept = Branches(torch.arange(len(candidates)), assignment, bodies.log_weight)
    groups = distinct_groups(bodies.model_of, kept, present)
    folds = train_groups(bodies, groups, clients, Fuse("geometric", FORGETTING), held_out)
    models, model_of, parent_of = distinct_results(groups, folds)
    new = replace(bodies, models=models, model_of=model_of, assignment=assignment, parent_of=parent_of)
    return new, torch.stack(said, 1)


def one_of(bodies: Hypotheses, place: int) -> Hypotheses:
    """The clusters of one candidate as the only story."""
    row = bodies.model_of[place]
    row = row[row >= 0]
    return Hypotheses(
        models=Gaussian(bodies.models.mean[row], bodies.models.precision[row]),
        model_of=torch.arange(len(row))[None],
        log_weight=torch.zeros(1, dtype=torch.float64),
        assignment=bodies.assignment[place : place + 1],
        parent_of=torch.arange(len(row)),
        family=torch.zeros(1, dtype=torch.int64),
    )
