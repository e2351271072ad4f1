"""Scoring that stops when it knows: which models still need scoring after a look at some of the examples.

Clients look at growing random parts of the examples that a full scoring would use. After each look a cluster that
cannot, at a stated error probability, be part of any of the k best hypotheses is dropped. The race is over when it is
known what is kept, one continuation of each hypothesis, and its weight well enough; otherwise the last look is at all
the rest, so that what is never dropped has been scored on every example, and on none twice.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import scipy  # loads its parts when they are first used: a client that does not race needs none
import torch
from torch import Tensor

from bcfl.association.ranking import k_best_assignments

FIRST_LOOK = 32  # examples on which every model is scored; each further look doubles what has been seen
TOLERANCE = 0.02  # by how much a log-weight may differ from full scoring's when a race stops before the last look
ROUNDING = 1e-9  # by which costs that are equal may seem to differ

# (client, belief) bool wanted, first, last -> mean (client, belief) and covariance (client, belief, belief) over the
# examples first:last of each client's own random order, or as many of them as it has; anything where nothing is wanted
Look = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Stakes:
    """What a race decides: which k continuations of these hypotheses are kept, and what they weigh."""

    belief_of: Tensor  # (hypothesis, cluster) -> belief
    log_weight: Tensor  # (hypothesis,)
    k: int
    error: float  # the probability that something else is kept
    tolerance: float = TOLERANCE  # by how much a log-weight may be off

    @property
    def num_beliefs(self) -> int:
        return int(self.belief_of.max()) + 1


@dataclass
class Seen:
    """What looks have told of the clients."""

    mean: Tensor  # (client, belief) log-likelihood per example, over the examples looked at
    covariance: Tensor  # (client, belief, belief) of it between examples
    num_looked: Tensor  # (client,) examples looked at; 0: nothing is known of the client
    num_scored: Tensor  # (client,) examples of a full scoring, of which those were drawn without replacement
    scale: Tensor  # (client,) cost per unit of mean log-likelihood: examples / temperature

    def of(self, clients: Tensor) -> "Seen":
        """What is known of some of the clients."""
        return Seen(*(getattr(self, field.name)[clients] for field in fields(self)))

    def add(self, clients: Tensor, first: int, last: int, mean: Tensor, covariance: Tensor) -> None:
        """These clients have looked at first:last, too; both tensors hold all clients."""
        num_new = self.num_scored[clients].clamp(max=last) - first
        known = self.mean[clients], self.covariance[clients]
        self.mean[clients], self.covariance[clients] = pooled(
            first, *known, num_new, mean[clients], covariance[clients]
        )
        self.num_looked[clients] += num_new

    def gaps(self, one: Tensor, others: Tensor, quantile: Tensor) -> tuple[Tensor, Tensor]:
        """How much less likely the others seem than one belief of each client, and how far that may be off."""
        variance, rows = self.covariance.diagonal(dim1=1, dim2=2), torch.arange(len(self.mean))[:, None]
        left = (1 - self.num_looked / self.num_scored) / self.num_looked  # variance of the mean, without replacement
        # One example tells nothing of others, but all of itself.
        unseen = (self.num_looked < 2) & (self.num_looked < self.num_scored)
        difference = variance[rows, one] + variance[rows, others] - 2 * self.covariance[rows, one, others]
        slack = quantile[:, None] * (difference.clamp(min=0) * left[:, None]).sqrt()
        slack = slack.masked_fill(unseen[:, None], math.inf).masked_fill(one == others, 0.0)
        gap = self.scale[:, None] * (self.mean[rows, one] - self.mean[rows, others])
        return gap, self.scale[:, None] * slack  # (client, belief) each


def race(
    look: Look,
    present: Tensor,  # (client,) bool; a client that does not answer a look leaves it, in place
    num_scored: Tensor,  # (client,) examples of a full scoring
    scale: Tensor,  # (client,) cost per unit of mean log-likelihood: examples / temperature
    stakes: Stakes,
) -> tuple[Tensor, Tensor]:
    """Which beliefs of each client are left, and their mean log-likelihood over its looks.

    With probability at least 1 − error full scoring's k best continuations, and the best one of each hypothesis, use
    only what is left, and their log-weights differ from its log-weights by `tolerance` at most: by nothing but rounding
    if clients with several beliefs left have looked at all of their examples. That is for the clients that stay: one
    that leaves takes with it what it was counted on for.
    """  # (client, belief) bool, (client, belief)
    num_clients, num_beliefs = len(num_scored), stakes.num_beliefs
    wanted = torch.ones(num_clients, num_beliefs, dtype=torch.bool)
    nothing = torch.zeros(num_clients, num_beliefs, num_beliefs, dtype=torch.float64)
    seen = Seen(nothing[:, 0].clone(), nothing, nothing[:, 0, 0].clone(), num_scored, scale)
    *looks, the_rest = _looks(int(num_scored.max()))
    for first, last in (*looks, the_rest):
        undecided = (wanted.sum(1) > 1) & present & (seen.num_looked < num_scored)
        if not undecided.any():
            break
        told = look(wanted & undecided[:, None], first, last)
        seen.add((undecided & present).nonzero()[:, 0], first, last, *told)
        if (first, last) == the_rest:
            break
        here = present.nonzero()[:, 0]
        wanted[here], unsure = contenders(seen.of(here), wanted[here], stakes, stakes.error / len(looks))
        if 2 * unsure <= stakes.tolerance:  # of any two hypotheses, and so when the weights sum to one
            break
    return wanted, seen.mean


def _looks(most: int) -> Iterator[tuple[int, int]]:
    """The parts of the clients' examples that are looked at one after the other.

    Each doubles what has been seen; one that would leave less than half of the examples takes the rest along.
    """
    first, last = 0, FIRST_LOOK
    while 2 * last <= most:
        yield first, last
        first, last = last, 2 * last
    yield first, most


def moments(log_likelihoods: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance over examples of the models' log-likelihoods, all that a look needs to tell."""
    values = log_likelihoods.double()
    num_models, num_examples = values.shape
    covariance = torch.cov(values, correction=min(1, num_examples - 1))  # of one example: 0
    return values.mean(1), covariance.view(num_models, -1)


def pooled(
    num: int, mean: Tensor, covariance: Tensor, num_new: Tensor, new_mean: Tensor, new_covariance: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of two parts of each client's examples together; the new part has `num_new` (client,).

    NaN in it, where nothing was looked at, counts as 0.
    """
    new_mean, new_covariance = new_mean.nan_to_num(0.0), new_covariance.nan_to_num(0.0)
    num_new = num_new[:, None]
    total, step = num + num_new, new_mean - mean
    between = step[:, :, None] * step[:, None, :] * (num * num_new / total)[..., None]
    spread = max(num - 1, 0) * covariance + (num_new - 1)[..., None] * new_covariance + between
    return mean + step * (num_new / total), spread / (total - 1).clamp(min=1)[..., None]


def contenders(seen: Seen, wanted: Tensor, stakes: Stakes, error: float) -> tuple[Tensor, float]:
    """Which beliefs may still be part of the k best continuations, or of the best of any hypothesis; the rest may not.

    `wanted` (client, belief) has not been dropped before. And how far the log-weights beside the first hypothesis' may
    be off if each hypothesis has only one continuation left and all of these are kept; otherwise infinity.

    With probability at least 1 − error every difference of two beliefs' mean log-likelihoods lies within `slack` of
    what was seen (to the accuracy of Student's t for the mean of the examples' paired differences). If so, then for
    each hypothesis, with b the client's best cluster so far, cluster c costs between `low` and `high` more than b, and
    changing a client from its best cluster to its second costs at most `swap`. Using c instead of the best costs at
    least `low`, so it is out if k sums of swaps (the empty one first) are below that: k assignments are better. It is
    out too if k continuations of any hypotheses are better, whose totals are bounded against the first hypothesis.

    If one continuation of each hypothesis is left, it is that of full scoring: which beliefs two of them differ by does
    not hang on the draw, and what the clients' draws are off adds up as independent errors do.
    """  # (client, belief) bool, number
    quantile = _quantile(seen, stakes, error)
    bounds, first_best = list[_Bounds](), None
    for beliefs, weight in zip(stakes.belief_of, stakes.log_weight.tolist(), strict=True):
        best = beliefs[seen.mean[:, beliefs].masked_fill(~wanted[:, beliefs], -math.inf).argmax(1)][:, None]
        first_best = best if first_best is None else first_best
        behind, unsure = seen.gaps(first_best, best, quantile)
        gap, slack = seen.gaps(best, beliefs.expand(len(best), -1), quantile)
        out = ~wanted[:, beliefs]
        low, high = (gap - slack).masked_fill(out, math.inf), (gap + slack).masked_fill(out, math.inf)
        bounds.append(_bounds(low, high, behind, unsure, weight, stakes.k))
    totals = sorted(total for one in bounds for total in one.totals)
    kth_total = totals[stakes.k - 1] if len(totals) >= stakes.k else math.inf
    kept = torch.zeros_like(wanted)
    for beliefs, one in zip(stakes.belief_of, bounds, strict=True):
        # What may be a hypothesis' best is never out: it may keep a place for its start.
        limit = min(one.own_limit, max(0.0, kth_total - one.lowest))
        kept[:, beliefs] |= one.low <= limit * (1 + ROUNDING) + ROUNDING
    kept &= wanted
    alone = len(bounds) <= stakes.k and bool((kept[:, stakes.belief_of].sum(2) == 1).all())
    return kept, max(one.unsure for one in bounds) if alone else math.inf


def _quantile(seen: Seen, stakes: Stakes, error: float) -> Tensor:
    """How many standard errors a difference may be off: two-sided, over all that is compared."""  # (client,)
    num_clients, num_beliefs = seen.mean.shape
    # All pairs of beliefs (which of them are compared depends on the draw) and of continuations.
    comparisons = num_clients * max(num_beliefs * (num_beliefs - 1), 1) + 2 * (len(stakes.belief_of) - 1)
    return torch.from_numpy(-scipy.special.stdtrit((seen.num_looked - 1).clamp(min=1).numpy(), error / comparisons))


class _Bounds(NamedTuple):
    """Between what a hypothesis' continuations must lie."""

    low: Tensor  # (client, cluster) the least that a cluster costs more than the client's best
    own_limit: float  # k of its own continuations cost no more than this above its best
    lowest: float  # the least that its best may cost
    totals: list[float]  # the most that its cheapest continuations may cost
    unsure: float  # how far its weight may be off beside the first hypothesis'


def _bounds(low: Tensor, high: Tensor, behind: Tensor, unsure: Tensor, log_weight: float, k: int) -> _Bounds:
    least = low.amin(1, keepdim=True)
    swap = (high - least).sort(1).values[:, 1:2].flatten()
    sums = _subset_sums(swap, k)
    return _Bounds(
        low,
        sums[-1] if len(sums) == k else math.inf,
        float((behind - unsure + least).sum()) - log_weight,
        [float((behind + unsure).sum()) - log_weight + extra for extra in sums],
        float(unsure.square().sum().sqrt()),
    )


def _subset_sums(values: Tensor, k: int) -> list[float]:
    """The k smallest sums of a subset of non-negative values, the empty one first; fewer if there are fewer."""
    values = values[values.isfinite()]
    if k == 1 or len(values) == 0:
        return [0.0]
    totals: list[float] = k_best_assignments(torch.stack([torch.zeros_like(values), values], 1), k)[1].tolist()
    return totals
