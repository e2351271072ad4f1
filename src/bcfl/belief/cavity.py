"""What all others say of a cluster: its belief without a client's own contribution.

A cluster's belief is its first prior times what its clients have said, each to the power of its membership,
p(ω) Π_j site_j(ω)^r_j, and a site is a Gaussian by its natural parameters. Without the factor of client j it is the
cavity of j: what j's data can be scored under without being explained by themselves, and what j trains from so that
nothing of its own is counted again. For a Gaussian likelihood all of it is exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.belief.gaussian import Gaussian

DAMPING = 0.5  # all clients speak at once, and with their full voices they would take turns in over-correcting


@dataclass(frozen=True)
class Sites:
    """What each client has said of each cluster, as natural parameters relative to the first prior's mean."""

    prior: Gaussian  # (parameter,): the first one, of all clusters alike
    precision: Tensor  # (client, cluster, parameter)
    shift: Tensor  # (client, cluster, parameter): precision · (mean − prior mean)
    statistics: Tensor  # (client, cluster, statistic): what is not learned by gradient
    heard: Tensor  # (client, cluster) bool
    power: Tensor  # (client, cluster): how much of a site counts: the client's membership when it last spoke

    def copy(self) -> "Sites":
        """The same, to be changed."""
        tensors = self.precision, self.shift, self.statistics, self.heard, self.power
        return Sites(self.prior, *(tensor.clone() for tensor in tensors))

    def say(self, client: int, cluster: int, prior: Gaussian, posterior: Gaussian) -> None:
        """Take in what a client has learned from its data: its posterior without the prior that it began with."""
        size = self.precision.shape[-1]
        precision = (posterior.precision - prior.precision)[:size].clamp(min=0)
        before, after = (
            belief.precision[:size] * (belief.mean[:size] - self.prior.mean[:size]) for belief in (prior, posterior)
        )
        kept = DAMPING if self.heard[client, cluster] else 0.0
        self.precision[client, cluster].mul_(kept).add_(precision, alpha=1 - kept)
        self.shift[client, cluster].mul_(kept).add_(after - before, alpha=1 - kept)
        self.statistics[client, cluster] = posterior.mean[size:]
        self.heard[client, cluster] = True


def no_sites(models: Gaussian, num_clients: int, num_parameters: int) -> Sites:
    """Nobody has said anything yet; the clusters' models are one and the same prior."""
    shape = (num_clients, len(models))
    silent = models.mean.new_zeros(*shape, num_parameters)
    statistics = models.mean.new_zeros(*shape, models.mean.shape[1] - num_parameters)
    nobody = torch.zeros(shape, dtype=torch.float64)
    return Sites(models[0], silent, silent.clone(), statistics, nobody.bool(), nobody)


def cavities(models: Gaussian, sites: Sites) -> Gaussian:
    """Each cluster's belief without each client's own part, by client, then cluster.

    Statistics are those of the cluster's model, and their precision is 0: as a prior they are flat.
    """  # (client × cluster, vector)
    size = sites.precision.shape[-1]
    power = sites.power.to(sites.precision.dtype)[..., None]
    precision, shift = ((power * natural) for natural in (sites.precision, sites.shift))
    others = (precision.sum(0) - precision).clamp(min=0) + sites.prior.precision[:size]
    mean = sites.prior.mean[:size] + (shift.sum(0) - shift) / others
    statistics = models.mean[:, size:].expand(len(sites.power), -1, -1)
    flat = torch.zeros_like(statistics)
    both = torch.cat([mean, statistics], -1), torch.cat([others, flat], -1)
    return Gaussian(*(part.flatten(0, 1) for part in both))


def combined(models: Gaussian, sites: Sites, num_examples: Tensor, num_evaluated: int) -> Gaussian:
    """Each cluster's belief with everybody's part; statistics are averaged by examples, momentum is at rest."""
    size = sites.precision.shape[-1]
    power = sites.power.to(sites.precision.dtype)
    precision = torch.einsum("jk,jkp->kp", power, sites.precision) + sites.prior.precision[:size]
    mean = sites.prior.mean[:size] + torch.einsum("jk,jkp->kp", power, sites.shift) / precision
    count = (power * num_examples[:, None] * sites.heard).to(sites.precision.dtype)  # (client, cluster)
    total = count.sum(0)[:, None]
    averaged = torch.einsum("jk,jks->ks", count, sites.statistics) / total.clamp(min=1e-30)
    statistics = torch.where(total > 0, averaged, models.mean[:, size:])
    statistics[:, num_evaluated - size :] = 0
    behind = total.expand_as(statistics)
    return Gaussian(torch.cat([mean, statistics], 1), torch.cat([precision, behind], 1))  # (cluster, vector)
