"""How likely each client belongs to each cluster, given the clusters' models: exact, without a list of assignments.

At given models clients are independent, so that a client's probabilities are a softmax over the clusters, summed over
all K^C assignments and not only over those that are kept. Limits on cluster sizes, and models that are not known but
drawn as several points, make clients depend on each other: see `memberships`.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bcfl.association.hypotheses import branch, marginals, renumbering
from bcfl.association.ranking import ClusterSize

MOST_SETS = 4096  # of one point from every cluster: beyond, the clusters' points are taken side by side
NUM_BEST = 32  # assignments that stand for all of them where cluster sizes are limited
DECIMALS = 6  # of a probability that is kept: a sure client is one number then


def memberships(
    score: Tensor,
    log_point_weight: Tensor,
    log_prior: Tensor,
    cluster_size: ClusterSize | None = None,
    elsewhere: Tensor | None = None,
    num_best: int = NUM_BEST,
) -> Tensor:
    """p(client j in cluster k | data), summed over all assignments: r_jk ∝ π_k · evidence_jk, rows sum to one.

    `score` (client, cluster, point) are log-likelihoods of the clients' data at points of each cluster's belief, of log
    weight `log_point_weight` (point,); `log_prior` (client, cluster) or (cluster,) is log π. With several points a
    cluster's clients are dependent, as they share one unknown model: for every set of one point per cluster there is a
    softmax, and these are averaged by the posterior weights of the sets. With `cluster_size` it is the share of the
    best assignments within these limits, of which `elsewhere` (cluster,) clients are not asked.
    """  # (client, cluster)
    score = score.double() + log_prior.double().expand(score.shape[:2])[..., None]
    if cluster_size is not None:
        cost = -(score + log_point_weight).logsumexp(-1)[None]
        counted = None if elsewhere is None else elsewhere[None]
        kept = branch(torch.zeros(1, dtype=torch.float64), cost, num_best, cluster_size, elsewhere=counted)
        return marginals(kept.assignment, kept.log_weight, score.shape[1])
    if score.shape[2] == 1:
        return score[..., 0].softmax(-1)
    clusters = torch.arange(score.shape[1])
    sets = _sets_of_points(score.shape[2], score.shape[1])  # (set, cluster) -> point
    at_set = score[:, clusters, sets].transpose(0, 1)  # (set, client, cluster)
    log_weight = log_point_weight[sets].sum(1) if len(sets) > score.shape[2] else log_point_weight
    log_weight = log_weight + at_set.logsumexp(-1).sum(-1)
    return (log_weight.softmax(0)[:, None, None] * at_set.softmax(-1)).sum(0)


def _sets_of_points(num_points: int, num_clusters: int) -> Tensor:
    """All ways to take one point of each cluster; where they are too many, point l of all clusters together."""
    if num_points**num_clusters > MOST_SETS:
        return torch.arange(num_points)[:, None].expand(-1, num_clusters)
    return torch.tensor(list(itertools.product(range(num_points), repeat=num_clusters)))  # (set, cluster)


def mixed(probability: Tensor, assignment: Tensor, log_weight: Tensor) -> Tensor:
    """Hypotheses' memberships mixed by their weights, the clusters numbered as in the first hypothesis.

    `probability` is (hypothesis, client, cluster), or (client, cluster) where all hypotheses say the same.
    """  # (client, cluster)
    if probability.dim() == 2:
        return probability
    names = renumbering(assignment, probability.shape[2])  # (hypothesis, cluster) -> cluster of the first
    renamed = torch.zeros_like(probability).scatter_add(2, names[:, None].expand_as(probability), probability)
    return (log_weight.double().exp()[:, None, None] * renamed).sum(0)


def co_membership(probability: Tensor, log_weight: Tensor) -> Tensor:
    """The probability that two clients share a cluster, whatever its number; a client shares all of its own."""
    told = probability if probability.dim() == 3 else probability[None]
    weight = log_weight.double().exp() if probability.dim() == 3 else torch.ones(1, dtype=torch.float64)
    shared: Tensor = torch.einsum("h,hik,hjk->ij", weight, told, told)
    return shared.fill_diagonal_(1.0)  # (client, client)


def rounded(membership: Tensor) -> Tensor:
    """To so many decimals as are kept of it: what a run tells and what is read back of it are the same to the bit."""
    return membership.double().round(decimals=DECIMALS)


Told = dict[str, Any]


def written(probability: Tensor, parent: Tensor) -> Told:
    """Rounded memberships in few characters: once for each parent, in the order in which these first come.

    A client that is sure of its cluster is that number alone. All hypotheses of one parent have the same memberships; a
    table (client, cluster) holds for all of them.
    """
    table = probability[None] if probability.dim() == 2 else probability[_first_of_each(parent)]
    rows = [[row.index(1.0) if 1.0 in row else row for row in rows] for rows in table.tolist()]
    return {"num_clusters": probability.shape[-1], "rows": rows, "of_parents": probability.dim() == 3}


def read(told: Mapping[str, Any], parent: Tensor) -> Tensor:
    """What `written` has made of them."""  # (hypothesis, client, cluster) or (client, cluster)
    lines = told["rows"]
    found = torch.zeros(len(lines), len(lines[0]), told["num_clusters"], dtype=torch.float64)
    for h, rows in enumerate(lines):
        for j, own in enumerate(rows):
            if isinstance(own, int):
                found[h, j, own] = 1.0
            else:
                found[h, j] = torch.tensor(own, dtype=torch.float64)
    if not told["of_parents"]:
        return found[0]
    place = {own: i for i, own in enumerate(parent[_first_of_each(parent)].tolist())}
    return found[[place[own] for own in parent.tolist()]]


def _first_of_each(parent: Tensor) -> list[int]:
    """The first hypothesis of each parent."""
    return list({own: h for h, own in reversed(list(enumerate(parent.tolist())))}.values())[::-1]


def log_odds(membership: Tensor, assignment: Tensor) -> Tensor:
    """How likely each assignment is beside the best one of its row of models: 0 for that one, −∞ for an impossible one.

    Who was never placed (−1) is no part of it.
    `membership` (hypothesis, client, cluster) is what the clients' data say at the models of each hypothesis.
    """  # (hypothesis,), the last axis of `assignment` (hypothesis, client)
    own = membership.gather(2, assignment.clamp(min=0)[..., None])[..., 0]
    return torch.where(assignment < 0, 0.0, (own / membership.amax(2)).log()).sum(1)
