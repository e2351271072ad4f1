"""Where the climb to a mixture of mixed models begins: all clients as one cluster, then groups of like ones."""

import torch
from torch import Tensor

from bcfl.belief.mixed import Clusters, Fit, WeakPrior, fit
from bcfl.belief.spread import TINY, Quadratics

FIRST_SHARE = 0.1  # of the noise that a coefficient's first variance explains
LLOYD_STEPS = 20
CLIMBS = 15  # steps that every start may take before only the best goes on


def flat_prior(like: Tensor) -> WeakPrior:
    """Nothing assumed."""  # (block, p)
    zero = torch.zeros_like(like)
    return WeakPrior(zero, zero, zero, 0.0)


def pooled_start(given: Quadratics, shared: Tensor, *, spread: bool) -> Clusters:
    """One cluster with the one model that explains all clients together, and a small variance of what may differ."""
    curvature, linear = given.curvature[:, 0].sum(0), given.linear[:, 0].sum(0)  # (block, p, p), (block, p)
    diagonal = curvature.diagonal(dim1=-2, dim2=-1)
    ridge = torch.diag_embed((1e-9 * diagonal.mean(-1, keepdim=True) + 1e-12).expand_as(diagonal))
    mean = torch.linalg.solve(curvature + ridge, linear[..., None])[..., 0]
    noise = torch.ones((), dtype=torch.float64)
    total = given.num_examples.sum()
    if given.noisy:
        residual = -2 * given.constant[:, 0].sum() - (mean * linear).sum()
        noise = (residual / total).clamp(min=1e-12)
    first = FIRST_SHARE * noise * total / diagonal.clamp(min=1e-9 * float(diagonal.max()))
    variance = torch.where(shared, 0.0, first) if spread else torch.zeros_like(mean)
    return Clusters(mean[None], variance[None], torch.zeros(1, dtype=torch.float64), noise)


def population(base: Fit) -> WeakPrior:
    """What is assumed of several clusters: their means lie among the clients of one, as wide as these lie.

    Of a coefficient in which clients do not differ, neither do clusters. One client's worth of weight each.
    """
    clusters = base.clusters
    variance = clusters.variance[0]
    precision = torch.where(variance > TINY, 1 / variance.clamp(min=TINY), 1e12)
    return WeakPrior(clusters.mean[0], precision, variance, 1.0)


def start_groups(base: Fit, num_clusters: int, generator: torch.Generator) -> Tensor:
    """Clients grouped by k-means of their coefficients in one population, in units of its spread."""  # (client,)
    found, variance = base.members.mean[:, 0], base.clusters.variance[0]
    unit = torch.where(variance > TINY, variance.clamp(min=TINY).rsqrt(), 0.0)
    points = ((found - base.clusters.mean[0]) * unit).flatten(1)
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    for _ in range(num_clusters - 1):
        distance = torch.cdist(points, centres).square().amin(1) + 1e-12
        centres = torch.cat([centres, points[torch.multinomial(distance, 1, generator=generator)]])
    for _ in range(LLOYD_STEPS):
        group = torch.cdist(points, centres).argmin(1)
        member = torch.nn.functional.one_hot(group, num_clusters).double()
        size = member.sum(0)[:, None]
        centres = torch.where(size > 0, member.T @ points / size.clamp(min=1), centres)
    return group


def grouped_start(given: Quadratics, base: Fit, group: Tensor, num_clusters: int, *, spread: bool) -> Clusters:
    """Clusters of these groups: means shrunk to the population's, variances a part of its."""
    member = torch.nn.functional.one_hot(group, num_clusters).double()
    clusters, information = base.clusters, base.members.information[:, 0]
    variance = clusters.variance[0]
    precision = torch.where(variance > TINY, 1 / variance.clamp(min=TINY), 1e12)
    score = torch.einsum("jk,jbp->kbp", member, base.members.score[:, 0])
    matrix = torch.einsum("jk,jbpq->kbpq", member, information) + torch.diag_embed(precision)
    mean = clusters.mean + torch.linalg.solve(matrix, score[..., None])[..., 0]
    share = (member.sum(0) + 1) / (len(group) + num_clusters)
    within = (variance / 2).expand_as(mean) if spread else torch.zeros_like(mean)
    return Clusters(mean, within.clone(), share.log(), clusters.noise)


def best_fit(
    given: Quadratics,
    base: Fit,
    num_clusters: int,
    *,
    spread: bool,
    starts: int,
    generator: torch.Generator,
    tolerance: float = 1e-9,
) -> Fit:
    """The best of several climbs: all begin, the best goes on to the top."""
    prior = population(base)
    best: Fit | None = None
    for _ in range(starts):
        group = start_groups(base, num_clusters, generator)
        start = grouped_start(given, base, group, num_clusters, spread=spread)
        found = fit(given, start, prior, spread=spread, max_steps=CLIMBS, tolerance=tolerance)
        best = found if best is None or found.log_evidence > best.log_evidence else best
    assert best is not None
    return fit(given, best.clusters, prior, spread=spread, tolerance=tolerance)
