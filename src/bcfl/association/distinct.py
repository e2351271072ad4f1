"""Hypotheses that differ: one for each grouping, none that is a near-copy of another, none that weighs next to nothing.

Who is where under given models is held by memberships in full. Hypotheses are for what these cannot hold: different
sets of cluster models, and groupings that are really in doubt.
"""

import math
from typing import Any

import torch
from torch import Tensor

from bcfl.association.hypotheses import Branches, normalise
from bcfl.association.seating import canonical

LEAST_WEIGHT = 1e-3  # of a hypothesis, and of a grouping beside the best one under the same models


def futures(model_of: Tensor, assignment: Tensor, away: Tensor, remembered: Tensor | None = None) -> list[Any]:
    """What each hypothesis will make of the rounds to come: the same for those that differ in their numbering alone.

    They have the same beliefs, and where a client is away, it is in the same place. `remembered` (hypothesis, client,
    cluster) is what else a hypothesis knows of its clusters.
    """  # [hypothesis]
    told = []
    for h, beliefs in enumerate(model_of):
        order = beliefs.argsort(stable=True)
        own = assignment[h, away]
        places = torch.where(own >= 0, beliefs[own.clamp(min=0)], -1)
        memory = None if remembered is None else tuple(remembered[h][:, order].flatten().tolist())
        told.append((*beliefs[order].tolist(), *places.tolist(), memory))
    return told


def alike(assignment: Tensor) -> list[list[int]]:
    """The hypotheses that group the clients alike, whatever the clusters' numbers: by their first ones, in order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for h, row in enumerate(assignment):
        groups.setdefault(canonical(row), []).append(h)
    return list(groups.values())


def without_near_copies(branches: Branches, log_odds: Tensor) -> Branches:
    """The stories without those that differ from their parent's best one only where the data leave no doubt.

    `log_odds` (hypothesis,) tells how likely each of one parent is beside the others by Bayes' rule. A temperature
    keeps the weights of such near-copies up, and they would fill all places.
    """
    likely = torch.zeros(len(log_odds), dtype=torch.bool)
    for parent in branches.parent.unique():
        siblings = branches.parent == parent
        best = log_odds[siblings].max()
        # By limits on cluster sizes even the best may be impossible for a client by itself.
        likely |= siblings & (log_odds >= best + math.log(LEAST_WEIGHT))
    return Branches(branches.parent[likely], branches.assignment[likely], normalise(branches.log_weight[likely]))


def heaviest_of_each(branches: Branches, groups: list[list[int]]) -> Branches:
    """One story for each group, its heaviest, with the weight of all; best first."""
    weight = torch.stack([branches.log_weight[rows].logsumexp(0) for rows in groups])
    order = weight.argsort(descending=True, stable=True)
    rows = torch.tensor([rows[0] for rows in groups])[order]
    return Branches(branches.parent[rows], branches.assignment[rows], normalise(weight[order]))
