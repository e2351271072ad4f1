"""Scoring that stops when it knows: which models still need scoring after a look at a few examples.

Every client first scores all models on a few examples. A cluster that cannot, at a stated error probability, be part
of any of the k best assignments is dropped; only the rest is scored in full.
"""

import math

import torch
from scipy.stats import t as student
from torch import Tensor

from bcfl.association import k_best_assignments

FIRST_LOOK = 32  # examples that every model is scored on


def moments(log_likelihoods: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance over examples of the models' log-likelihoods, all that a first look needs to tell."""
    return log_likelihoods.double().mean(1), torch.cov(log_likelihoods.double()).view(len(log_likelihoods), -1)


def contenders(
    mean: Tensor,  # (client, belief) log-likelihood per example, over the examples of the first look
    covariance: Tensor,  # (client, belief, belief) of it between examples
    num_looked: Tensor,  # (client,) examples of the first look
    num_scored: Tensor,  # (client,) examples of a full scoring, of which the first look took the first ones
    scale: Tensor,  # (client,) cost per unit of mean log-likelihood: examples / temperature
    belief_of: Tensor,  # (hypothesis, cluster) -> belief
    k: int,
    error: float,
) -> Tensor:
    """Which beliefs may still decide a client's place in the k best assignments of some hypothesis; the rest may not.

    With probability at least 1 − error (to the accuracy of Student's t for the mean of the examples' paired
    differences) the k best assignments after full scoring use only what is marked. For each hypothesis, with b the
    client's best cluster so far, the true gap of cluster c to b lies in [low, high]. Leaving c for the client's true
    best saves at least `low`. Changing another client's cluster costs at most `swap`, its second smallest worst-case
    excess; so k assignments are better than any that uses c, if k sums of swaps (the empty one first) stay below
    `low`. The cheapest swap is set aside, as it may be the client's own.
    """  # (client, belief) bool
    num_clients, num_beliefs = mean.shape
    # Two-sided, over all pairs that are compared; nothing is left to chance where the first look took everything.
    quantile = torch.from_numpy(student.isf(error / (2 * num_clients * num_beliefs), (num_looked - 1).clamp(min=1)))
    left = (1 - num_looked / num_scored) / num_looked  # variance of the mean, without replacement
    wanted = torch.zeros(num_clients, num_beliefs, dtype=torch.bool)
    rows = torch.arange(num_clients)
    for beliefs in belief_of:
        own, spread = mean[:, beliefs], covariance[:, beliefs][:, :, beliefs]
        best = own.argmax(1)
        variance = spread.diagonal(dim1=1, dim2=2)
        difference = variance + variance[rows, best][:, None] - 2 * spread[rows, best]
        gap = own[rows, best][:, None] - own
        slack = quantile[:, None] * (difference.clamp(min=0) * left[:, None]).sqrt()
        low, high = scale[:, None] * (gap - slack), scale[:, None] * (gap + slack)
        excess = high - low.amin(1, keepdim=True)
        swap = excess.sort(1).values[:, 1] if len(beliefs) > 1 else torch.full((num_clients,), math.inf)
        others = swap.sort().values[1:]
        wanted[:, beliefs] |= low <= _kth_subset_sum(others, k)
    return wanted


def _kth_subset_sum(values: Tensor, k: int) -> float:
    """The k-th smallest sum of a subset of non-negative values, the empty one being the first; ∞ if there are fewer."""
    if k == 1:
        return 0.0
    values = values[values.isfinite()]
    if len(values) == 0:
        return math.inf
    _, totals = k_best_assignments(torch.stack([torch.zeros_like(values), values], 1), k)
    return float(totals[-1]) if len(totals) == k else math.inf
