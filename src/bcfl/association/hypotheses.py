"""Weighted hypotheses of who belongs where, and what they say together.

Weights are kept as logarithms throughout. The assignment of client j in hypothesis h is `assignment[h, j]`, a cluster
index.
"""

import math
from dataclasses import dataclass

import scipy  # loads its optimisers when they are first used: a client never needs them
import torch
from torch import Tensor

from bcfl.association.ranking import ClusterSize, Search, rank


@dataclass(frozen=True)
class Branches:
    """Weighted stories about one round: which past hypothesis each continues, and who is where now."""

    parent: Tensor  # (hypothesis,) -> past hypothesis
    assignment: Tensor  # (hypothesis, client) -> cluster
    log_weight: Tensor  # (hypothesis,), normalised, best first


@dataclass(frozen=True)
class Families:
    """Past hypotheses by the start that they descend from, of which each has a place as long as it may be right.

    The best story of every family has precedence as long as its log-weight is within `margin` of the very best:
    near-copies of one story then cannot crowd out a different one before the evidence has spoken.
    """

    of: Tensor  # (past hypothesis,)
    margin: float = 0.0

    def first(self, log_weight: list[float], parent: list[int]) -> list[int]:
        """The order in which stories, best first, are kept: each family's best within the margin, then the rest."""
        heads: dict[int, int] = {}
        for i, h in enumerate(parent):
            heads.setdefault(int(self.of[h]), i)
        safe = {i for i in heads.values() if log_weight[0] - log_weight[i] <= self.margin}
        return sorted(range(len(parent)), key=lambda i: i not in safe)


def normalise(log_weight: Tensor) -> Tensor:
    """The log-weights shifted so that the weights sum to one."""
    return log_weight.log_softmax(0)  # takes the maximum off first: large common offsets do not eat the digits


def branch(
    log_weight: Tensor,
    cost: Tensor,
    k: int,
    cluster_size: ClusterSize | None = None,
    families: Families | None = None,
    elsewhere: Tensor | None = None,
    search: Search = "exact",
) -> Branches:
    """The k likeliest continuations of all past hypotheses together, best first.

    `cost` is (hypothesis, client, cluster): what each past hypothesis makes of the new data. The log-weight of a
    continuation is that of its parent minus its cost, normalised over the k that are returned. Equal weights: the
    earlier parent first, then the order of `k_best_assignments`. With `families` the best of each has precedence.

    `elsewhere` (hypothesis, cluster) counts clients that keep their clusters without being asked: `cluster_size` counts
    them, too. A cluster then has fewer than the fewest only while there are too few clients to give all as many.

    With `search` "one_change" a past hypothesis' continuations are the best and single changes of it, as in
    `one_change_assignments`; it knows no `cluster_size`.
    """
    past = _checked(log_weight, cost)
    ranked = {
        h: rank(cost[h], k, cluster_size, None if elsewhere is None else elsewhere[h], search)
        for h, weight in enumerate(past)
        if weight > -math.inf
    }
    candidates = sorted((total - past[h], h, i) for h, row in ranked.items() for i, total in enumerate(row.totals))
    if families is not None:
        order = families.first([-total for total, _, _ in candidates], [h for _, h, _ in candidates])
        candidates = [candidates[i] for i in order]
    candidates = sorted(candidates[:k])
    return Branches(
        parent=torch.tensor([h for _, h, _ in candidates]),
        assignment=torch.stack([ranked[h].assignment(i) for _, h, i in candidates]),
        log_weight=normalise(torch.tensor([-total for total, _, _ in candidates], dtype=torch.float64)),
    )


def _checked(log_weight: Tensor, cost: Tensor) -> list[float]:
    """The past hypotheses' log-weights, if they are sound."""
    if log_weight.dim() != 1 or cost.dim() != 3 or len(log_weight) != len(cost) or not len(cost):
        shapes = f"{tuple(log_weight.shape)} and {tuple(cost.shape)}"
        raise ValueError(f"log_weight must be (hypothesis,) beside cost (hypothesis, client, cluster), got {shapes}")
    past: list[float] = log_weight.double().tolist()
    if not all(weight < math.inf for weight in past) or max(past) == -math.inf:
        raise ValueError("log_weight must not hold NaN or +∞, and at least one entry must be finite")
    return past


def reweight(branches: Branches, log_weight: Tensor) -> Branches:
    """The same stories with other (unnormalised) log-weights, best first again; equal weights keep their order."""
    _check_weighted(branches.assignment, log_weight)
    order = log_weight.argsort(descending=True, stable=True)
    return Branches(branches.parent[order], branches.assignment[order], normalise(log_weight[order].double()))


def prune(
    branches: Branches,
    max_hypotheses: int,
    min_weight: float = 0.0,
    families: Families | None = None,
) -> Branches:
    """The heaviest stories: first those under `min_weight` go (never all), then all beyond `max_hypotheses`."""
    if max_hypotheses < 1:
        raise ValueError(f"max_hypotheses must be at least 1, got {max_hypotheses}")
    if not 0 <= min_weight < 1:
        raise ValueError(f"min_weight must be in [0, 1), got {min_weight}")
    enough = max(1, int((branches.log_weight.exp() >= min_weight).sum()))
    kept = list(range(enough))
    if families is not None:
        kept = families.first(branches.log_weight[:enough].tolist(), branches.parent[:enough].tolist())
    rows = torch.tensor(sorted(kept[:max_hypotheses]))
    return Branches(branches.parent[rows], branches.assignment[rows], normalise(branches.log_weight[rows]))


def _check_weighted(assignment: Tensor, log_weight: Tensor) -> None:
    if assignment.dim() != 2 or log_weight.shape != assignment.shape[:1]:
        shapes = f"{tuple(log_weight.shape)} and {tuple(assignment.shape)}"
        raise ValueError(f"log_weight must be (hypothesis,) beside assignment (hypothesis, client), got {shapes}")


def marginals(assignment: Tensor, log_weight: Tensor, num_clusters: int) -> Tensor:
    """The probability that a client belongs to a cluster, summed over hypotheses.

    Clusters of the same index must mean the same in all hypotheses: see `align`. A client that a hypothesis leaves
    unassigned (−1) gets none of that hypothesis' weight.
    """  # (client, cluster)
    _check_weighted(assignment, log_weight)
    weight = log_weight.double().exp()
    probability = torch.zeros(assignment.shape[1], num_clusters, dtype=torch.float64)
    for row, share in zip(assignment, weight, strict=True):
        known = (row >= 0).nonzero()[:, 0]
        probability[known, row[known]] += share
    return probability


def renumbering(assignment: Tensor, num_clusters: int) -> Tensor:
    """What each hypothesis' clusters are called in the first hypothesis, so that the two agree most.

    Trajectories from different starts number their clusters differently; what they say together is only visible
    once cluster 2 means the same in all of them.
    """  # (hypothesis, cluster) -> cluster of the first hypothesis
    reference, names = assignment[0], []
    for row in assignment:
        both = (row >= 0) & (reference >= 0)
        pairs = row[both] * num_clusters + reference[both]
        overlap = torch.bincount(pairs, minlength=num_clusters**2).view(num_clusters, num_clusters)
        names.append(torch.from_numpy(scipy.optimize.linear_sum_assignment(overlap.numpy(), maximize=True)[1]))
    return torch.stack(names)


def align(assignment: Tensor, num_clusters: int) -> Tensor:
    """The same groupings with each hypothesis' clusters renumbered as in `renumbering`."""
    renumbered = renumbering(assignment, num_clusters).gather(1, assignment.clamp(min=0))
    return torch.where(assignment >= 0, renumbered, assignment)  # (hypothesis, client) -> cluster of the first


def co_association(assignment: Tensor, log_weight: Tensor) -> Tensor:
    """The probability that two clients share a cluster, whatever its number; unassigned clients share nothing."""
    _check_weighted(assignment, log_weight)
    shared = torch.zeros(assignment.shape[1], assignment.shape[1], dtype=torch.float64)
    for row, share in zip(assignment, log_weight.double().exp().tolist(), strict=True):
        shared += share * ((row[:, None] == row) & (row >= 0)).double()  # a float times a truth value is float32
    return shared  # (client, client)


def entropy(probability: Tensor) -> Tensor:
    """How unsure each client's association is, in nats: 0 when certain, log K when anything goes."""
    nats: Tensor = torch.special.entr(probability).sum(-1).clamp(min=0)  # of 1 + rounding it is a hair below
    return nats  # (client,)


def num_hypotheses(num_clusters: int, num_clients: int, overlapping: bool) -> int:
    """The paper's N(K, C) for one round: 2^(CK) with free association, K^C with one cluster per client."""
    if num_clusters < 1 or num_clients < 0:
        raise ValueError(f"num_clusters must be ≥ 1 and num_clients ≥ 0, got {num_clusters} and {num_clients}")
    count: int = 2 ** (num_clients * num_clusters) if overlapping else num_clusters**num_clients
    return count
