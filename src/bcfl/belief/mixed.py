"""A mixture of mixed models: clusters of clients whose members differ, by their marginal likelihood.

zⱼ ~ Cat(π), θⱼ | zⱼ=k ~ N(μₖ, diag vₖ). Memberships are a softmax of evidences; means, variances, noise and shares
maximise Σⱼ log Σₖ πₖ p(Dⱼ | μₖ, vₖ) by Fisher scoring within EM, which works at v = 0 too, where moments stand still.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.belief.spread import TINY, Members, Quadratics, members

PSEUDO_CLIENTS = 1e-3  # behind the shares of the clusters
LARGEST_STEP = 1.5  # of a log variance at a time
NEGLIGIBLE = 1e-10  # a membership below which a client is no part of a cluster


@dataclass(frozen=True)
class Clusters:
    """K clusters, each a Gaussian over its members' coefficients."""

    mean: Tensor  # (cluster, block, p)
    variance: Tensor  # (cluster, block, p); 0: the same for all members
    log_share: Tensor  # (cluster,)
    noise: Tensor  # (), the variance of a Gaussian likelihood; 1 otherwise


@dataclass(frozen=True)
class WeakPrior:
    """What is assumed before any data: cluster means near `mean`, variances near `variance`, by `weight` clients."""

    mean: Tensor  # (block, p)
    precision: Tensor  # (block, p), of the cluster means
    variance: Tensor  # (block, p)
    weight: float

    def log_density(self, of: Clusters) -> Tensor:
        free = of.variance > TINY
        ratio = torch.where(free, of.variance.clamp(min=TINY).log() + self.variance / of.variance.clamp(min=TINY), 0.0)
        return -((of.mean - self.mean).square() * self.precision).sum() / 2 - self.weight * ratio.sum() / 2


@dataclass(frozen=True)
class Fit:
    """Clusters at the maximum, the clients' memberships, and the (penalised) log evidence there."""

    clusters: Clusters
    membership: Tensor  # (client, cluster)
    log_evidence: float
    members: Members


def joint(given: Quadratics, clusters: Clusters) -> tuple[Tensor, Members]:
    """log πₖ p(Dⱼ | cluster k), and the clients as members."""  # (client, cluster)
    found = members(given.at_noise(clusters.noise), clusters.mean, clusters.variance)
    return clusters.log_share + found.log_evidence, found


def fit(
    given: Quadratics, start: Clusters, prior: WeakPrior, *, spread: bool, max_steps: int = 200, tolerance: float = 1e-9
) -> Fit:
    """The clusters that explain the clients best, climbing from `start`; no step lowers the evidence."""
    now = _at(given, start, prior)
    for _ in range(max_steps):
        mean, log_variance, log_noise = _direction(given, now, prior, spread)
        size = 1.0
        while True:
            trial = _at(given, _moved(now, mean * size, log_variance * size, log_noise * size), prior)
            if trial.log_evidence >= now.log_evidence - 1e-12 * abs(now.log_evidence) or size < 1e-3:
                break
            size /= 2
        gain = trial.log_evidence - now.log_evidence
        if gain > 0:
            now = trial
        if gain <= tolerance * (1 + abs(now.log_evidence)):
            return now
    return now


def _at(given: Quadratics, clusters: Clusters, prior: WeakPrior) -> Fit:
    log_joint, found = joint(given, clusters)
    log_share = PSEUDO_CLIENTS * clusters.log_share.sum()
    total = log_joint.logsumexp(1).sum() + prior.log_density(clusters) + log_share
    return Fit(clusters, log_joint.softmax(1), float(total), found)


def _moved(now: Fit, mean: Tensor, log_variance: Tensor, log_noise: Tensor) -> Clusters:
    old = now.clusters
    shares = now.membership.sum(0) + PSEUDO_CLIENTS
    return Clusters(
        old.mean + mean, old.variance * log_variance.exp(), (shares / shares.sum()).log(), old.noise * log_noise.exp()
    )


def _direction(given: Quadratics, now: Fit, prior: WeakPrior, spread: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A step of Fisher scoring in the means, log variances and log noise, with the memberships as they are."""
    r, found, clusters = now.membership, now.members, now.clusters
    score = found.score if given.pull is None else found.score + given.pull.mean
    slope = torch.einsum("jk,jkbp->kbp", r, score) - prior.precision * (clusters.mean - prior.mean)
    information = torch.einsum("jk,jkbpq->kbpq", r, found.information) + torch.diag_embed(
        prior.precision.expand_as(slope)
    )
    mean = _solved(information, slope)
    if not spread and not given.noisy:
        return mean, torch.zeros_like(mean), torch.zeros_like(clusters.noise)
    log_variance, log_noise = _scale_step(given, now, prior, spread)
    return mean, log_variance, log_noise


def _scale_step(given: Quadratics, now: Fit, prior: WeakPrior, spread: bool) -> tuple[Tensor, Tensor]:
    """The part of it for log variances and log noise, which know of each other but not of the means."""
    r, found, v = now.membership, now.members, now.clusters.variance
    free = (v > TINY) if spread else torch.zeros_like(v, dtype=torch.bool)
    ratio = prior.variance / v.clamp(min=TINY)
    change = found.score.square() - found.information.diagonal(dim1=-2, dim2=-1)
    slope = v * torch.einsum("jk,jkbp->kbp", r, change) / 2 + prior.weight / 2 * (ratio - 1)
    if given.pull is not None:
        slope = slope + torch.einsum("jk,jkbp->kbp", r, given.pull.spread)
    squares = torch.einsum("jk,jkbpq->kbpq", r, found.information.square())
    second = v[..., :, None] * squares * v[..., None, :] / 2
    second = second + torch.diag_embed(prior.weight / 2 * ratio.clamp(max=1.0) + 1e-9)
    if not given.noisy:
        step = torch.where(free, _solved(second, torch.where(free, slope, 0.0)), 0.0)
        return step.clamp(-LARGEST_STEP, LARGEST_STEP), torch.zeros_like(now.clusters.noise)
    # Gaussian noise: one more coordinate, which all clusters share.
    noise_slope, noise_second, crossed = _noise_parts(given, now)
    crossed = (v * crossed / 2).flatten()
    matrix = torch.block_diag(*second.flatten(0, 1), noise_second[None, None])
    matrix[:-1, -1] = matrix[-1, :-1] = crossed
    fixed = torch.cat([~free.flatten(), torch.tensor([False])])
    matrix[fixed, :] = matrix[:, fixed] = 0.0
    matrix.diagonal()[fixed] = 1.0
    right = torch.cat([slope.flatten(), noise_slope[None]]).masked_fill(fixed, 0.0)
    step = torch.linalg.solve(matrix, right).clamp(-LARGEST_STEP, LARGEST_STEP)
    return step[:-1].view_as(v), step[-1]


def _noise_parts(given: Quadratics, now: Fit) -> tuple[Tensor, Tensor, Tensor]:
    """Slope and information of the log noise variance, and its information with each variance (not yet times v/2)."""
    r, found, noise = now.membership, now.members, now.clusters.noise
    product = found.curvature @ found.covariance  # (client, cluster, block, p, p)
    trace = product.diagonal(dim1=-2, dim2=-1).sum((-1, -2))
    twice = (product * product.mT).sum((-1, -2, -3))
    m = found.mean
    raw = given.constant + (given.linear * m).sum((-1, -2))
    raw = raw - (m * (given.curvature @ m[..., None])[..., 0]).sum((-1, -2)) / 2  # −½ residual sum of squares
    n = given.num_examples[:, None]
    slope = (r * (-raw / noise - n / 2 + trace / 2)).sum()
    second = (r * (n - 2 * trace + twice)).sum() / 2
    # Xᵀ Σ⁻² X σ² = Gᵀ H G with G = I − CH
    rest = found.information - found.information @ found.covariance @ found.curvature
    return slope, second, torch.einsum("jk,jkbp->kbp", r, rest.diagonal(dim1=-2, dim2=-1))


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix⁻¹ right, with a ridge far below anything the data say where they say nothing at all."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    ridge = 1e-10 * diagonal.mean(-1, keepdim=True) + 1e-12
    solution: Tensor = torch.linalg.solve(matrix + torch.diag_embed(ridge.expand_as(diagonal)), right[..., None])
    return solution[..., 0]
