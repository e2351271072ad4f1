"""Groupings of clients when their number of groups is unknown: the Chinese-restaurant prior, and telling them apart."""

import torch
import torch.nn.functional as F
from torch import Tensor


def log_partition_prior(assignment: Tensor, concentration: float) -> Tensor:
    """log p of the grouping under a Chinese-restaurant process: log Γ(α)/Γ(α+n) + Σ_k log α Γ(n_k).

    The last axis of `assignment` is the client; −1 is a client that belongs to no group yet.
    """  # (..., client) -> (...) float64
    size = F.one_hot(assignment + 1)[..., 1:].sum(-2).double()  # (..., cluster)
    alpha = torch.tensor(concentration, dtype=torch.float64)
    groups = torch.where(size > 0, alpha.log() + size.clamp(min=1).lgamma(), 0.0).sum(-1)
    return alpha.lgamma() - (alpha + size.sum(-1)).lgamma() + groups


def log_seat(assignment: Tensor, num_clusters: int, concentration: float) -> Tensor:
    """log of what the prior makes of each client in each cluster while the others stay: n₋ⱼ, or α where nobody is.

    The process' predictive rule, up to a constant per client.
    """  # (client,) -> (client, cluster) float64
    member = F.one_hot(assignment + 1, num_clusters + 1)[:, 1:].double()
    others = member.sum(0) - member
    return torch.where(others > 0, others, concentration).log()


def canonical(assignment: Tensor) -> tuple[int, ...]:
    """The grouping with its clusters numbered in order of appearance: equal exactly for equal partitions."""
    number: dict[int, int] = {-1: -1}
    return tuple(number.setdefault(own, len(number) - 1) for own in assignment.tolist())
