"""Where a client belongs by its inputs alone: a newcomer that has no labels yet.

Every client tells 2·D + 1 numbers once: how many inputs it has, and of each of D features the sum and the sum of
squares. The features must mean the same in all clusters: the inputs themselves, or what one shared body makes of them.
A client counts as one draw from its cluster, so that clients of a cluster may differ: its features' means and
log-variances are normal around the cluster's, with the variance between clients that is pooled over clusters.

Features hang together, and a product over them is far too sure. So the log-densities are divided by a temperature, the
one under which the members themselves, each left out of its cluster, are told best. That also measures how often the
inputs place a client rightly. Where clusters differ only in p(y | x) that is no better than a guess, and nothing is
said then.
"""

import math
from dataclasses import dataclass

import scipy
import torch
from torch import Tensor

TEMPERATURES = tuple(2.0**power for power in range(13))
DOUBT = 0.05  # how likely members may be placed so well by guessing that a placement is still said
LEAST_VARIANCE = 1e-9


def input_sums(features: Tensor) -> Tensor:
    """What a client tells of its inputs: their number, then each feature's sum, then each one's sum of squares."""
    rows = features.double().flatten(1)
    count = torch.tensor([len(rows)], dtype=torch.float64)
    return torch.cat([count, rows.sum(0), rows.square().sum(0)])  # (1 + 2 · feature,)


@dataclass(frozen=True)
class Placed:
    """Where a client without labels belongs, or that its inputs do not tell."""

    probability: Tensor  # (cluster,): the clusters' shares of the members where it abstains
    abstains: bool
    accuracy: float  # of members, each placed by its inputs while its cluster knew nothing of it
    guessing: float  # what always saying the largest cluster would have got of them

    @property
    def cluster(self) -> int | None:
        """The most likely cluster; None where the inputs do not tell."""
        return None if self.abstains else int(self.probability.argmax())


@dataclass(frozen=True)
class Densities:
    """What the clusters' clients look like from outside, by memberships (client, cluster) and what clients told."""

    sums: Tensor  # (client, 1 + 2 · feature)
    membership: Tensor  # (client, cluster)
    temperature: float
    accuracy: float
    guessing: float
    tells: bool  # whether members are placed better than by guessing

    def place(self, sums: Tensor) -> Placed:
        """A newcomer that told these sums."""
        share = self.membership.sum(0) / self.membership.sum()
        if not self.tells:
            return Placed(share, True, self.accuracy, self.guessing)
        log_density = _log_densities(self.sums, self.membership, sums[None], torch.zeros(1, len(self.sums)))[0]
        probability = (log_density / self.temperature + share.log()).softmax(0)
        return Placed(probability, False, self.accuracy, self.guessing)


def densities(sums: Tensor, membership: Tensor) -> Densities:
    """The clusters' densities, their temperature, and how well they place the members themselves."""
    left_out = torch.eye(len(sums), dtype=torch.float64)
    log_density = _log_densities(sums, membership.double(), sums, left_out)  # (client, cluster)
    share = membership.double().sum(0) / membership.sum()
    told = {t: (log_density / t + share.log()).log_softmax(1) for t in TEMPERATURES}
    temperature = max(TEMPERATURES, key=lambda t: float((membership * told[t].clamp(min=-1e9)).sum()))
    right = int((log_density.argmax(1) == membership.argmax(1)).sum())
    guessing = float(membership.argmax(1).bincount(minlength=len(share)).max()) / len(sums)
    by_chance = float(scipy.stats.binom.sf(right - 1, len(sums), guessing))
    return Densities(sums, membership.double(), temperature, right / len(sums), guessing, by_chance < DOUBT)


def _log_densities(sums: Tensor, membership: Tensor, asked: Tensor, left_out: Tensor) -> Tensor:
    """log p(what a client told | cluster), when clients are left out of their clusters as `left_out` says.

    `left_out` (asked, client) is 1 where a client does not count. A cluster's mean is known to its members' number; a
    cluster without members is as wide as all of them together.
    """  # (asked, cluster)
    floor = _least_variance(sums)
    (seen, noise), (told, own_noise) = _statistics(sums, floor), _statistics(asked, floor)  # (client, statistic) each
    weight = membership.double() * (1 - left_out[..., None])  # (asked, client, cluster)
    size = weight.sum(1)[..., None]  # (asked, cluster, 1)
    total = torch.einsum("ajk,js->aks", weight, seen)
    squares = torch.einsum("ajk,js->aks", weight, seen.square())
    everyone = (total.sum(1, keepdim=True) / size.sum(1, keepdim=True)).expand_as(total)
    mean = torch.where(size > 0, total / size.clamp(min=1e-300), everyone)
    within = (squares - size * mean.square()).clamp(min=0).sum(1)  # (asked, statistic), over all clusters
    freedom = (size.sum(1) - (size > 0.5).sum(1)).clamp(min=1)
    spread = (within / freedom).clamp(min=LEAST_VARIANCE)  # of clients of one cluster, the noise of the means in it
    usual = torch.einsum("aj,js->as", weight.sum(2), noise) / size.sum(1)
    variance = (spread - usual).clamp(min=0) + own_noise + LEAST_VARIANCE  # of a client with as many inputs as this
    variance = variance[:, None] + spread[:, None] / size.clamp(min=1e-3)
    distance = (told[:, None] - mean).square() / variance
    return -0.5 * (distance + variance.log() + math.log(2 * math.pi)).sum(-1)


def _statistics(sums: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Each feature's mean and log-variance in a client's inputs, and the variance with which so many inputs tell them.

    `floor` (feature,) is added to the variances: one that is 0 has no logarithm.
    """  # (client, statistic) each
    count, mean, variance = _moments(sums)
    noise = torch.cat([(variance + floor) / count, (2 / count).expand_as(variance)], 1)
    return torch.cat([mean, (variance + floor).log()], 1), noise


def _least_variance(sums: Tensor) -> Tensor:
    """A small share of what is usual of each feature."""  # (feature,)
    return 0.01 * _moments(sums)[2].mean(0) + LEAST_VARIANCE


def _moments(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, means and variances of each client's inputs."""  # (client, 1), (client, feature) twice
    count, features = sums[:, :1], (sums.shape[1] - 1) // 2
    mean = sums[:, 1 : 1 + features] / count
    return count, mean, (sums[:, 1 + features :] / count - mean.square()).clamp(min=0)
