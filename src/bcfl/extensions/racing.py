"""Scoring that stops when it knows: which models still need scoring after a look at some of the examples.

Clients look at growing random parts of the examples that a full scoring would use. After each look a cluster that
cannot, at a stated error probability, be part of any of the k best hypotheses is dropped. The race is over when it is
known what is kept, one continuation of each hypothesis, and its weight well enough; otherwise the last look is at all
the rest, so that what is never dropped has been scored on every example, and on none twice.
"""

import math
from collections.abc import Callable, Iterator

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


def race(
    look: Look,
    present: Tensor,  # (client,) bool; a client that does not answer a look leaves it, in place
    num_scored: Tensor,  # (client,) examples of a full scoring
    scale: Tensor,  # (client,) cost per unit of mean log-likelihood: examples / temperature
    belief_of: Tensor,  # (hypothesis, cluster) -> belief
    log_weight: Tensor,  # (hypothesis,)
    k: int,
    error: float,
    tolerance: float = TOLERANCE,
) -> tuple[Tensor, Tensor]:
    """Which beliefs of each client are left, and their mean log-likelihood over its looks.

    With probability at least 1 − error full scoring's k best continuations, and the best one of each hypothesis, use
    only what is left, and their log-weights differ from its log-weights by `tolerance` at most: by nothing but rounding
    if clients with several beliefs left have looked at all of their examples. That is for the clients that stay: one
    that leaves takes with it what it was counted on for.
    """  # (client, belief) bool, (client, belief)
    num_clients, num_beliefs = len(num_scored), int(belief_of.max()) + 1
    wanted = torch.ones(num_clients, num_beliefs, dtype=torch.bool)
    num_looked = torch.zeros(num_clients, dtype=torch.float64)
    mean = torch.zeros(num_clients, num_beliefs, dtype=torch.float64)
    covariance = torch.zeros(num_clients, num_beliefs, num_beliefs, dtype=torch.float64)
    *looks, the_rest = _looks(int(num_scored.max()))
    for first, last in (*looks, the_rest):
        undecided = (wanted.sum(1) > 1) & present & (num_looked < num_scored)
        if not undecided.any():
            break
        new_mean, new_covariance = look(wanted & undecided[:, None], first, last)
        rows = (undecided & present).nonzero()[:, 0]
        num_new = num_scored[rows].clamp(max=last) - first
        mean[rows], covariance[rows] = pooled(
            first, mean[rows], covariance[rows], num_new, new_mean[rows], new_covariance[rows]
        )
        num_looked[rows] += num_new
        if (first, last) == the_rest:
            break
        here = present.nonzero()[:, 0]
        seen = (mean[here], covariance[here], num_looked[here], num_scored[here], scale[here])
        wanted[here], unsure = contenders(*seen, belief_of, log_weight, wanted[here], k, error / len(looks))
        if 2 * unsure <= tolerance:  # of any two hypotheses, and so when the weights sum to one
            break
    return wanted, mean


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


def contenders(
    mean: Tensor,  # (client, belief) log-likelihood per example, over the examples looked at
    covariance: Tensor,  # (client, belief, belief) of it between examples
    num_looked: Tensor,  # (client,) examples looked at; 0: nothing is known of the client
    num_scored: Tensor,  # (client,) examples of a full scoring, of which those were drawn without replacement
    scale: Tensor,  # (client,) cost per unit of mean log-likelihood: examples / temperature
    belief_of: Tensor,  # (hypothesis, cluster) -> belief
    log_weight: Tensor,  # (hypothesis,)
    wanted: Tensor,  # (client, belief) bool: what has not been dropped before
    k: int,
    error: float,
) -> tuple[Tensor, float]:
    """Which beliefs may still be part of the k best continuations, or of the best of any hypothesis; the rest may not.

    And how far the log-weights beside the first hypothesis' may be off if each hypothesis has only one continuation
    left and all of these are kept; otherwise infinity.

    With probability at least 1 − error every difference of two beliefs' mean log-likelihoods lies within `slack` of
    what was seen (to the accuracy of Student's t for the mean of the examples' paired differences). If so, then for
    each hypothesis, with b the client's best cluster so far, cluster c costs between `low` and `high` more than b, and
    changing a client from its best cluster to its second costs at most `swap`. Using c instead of the best costs at
    least `low`, so it is out if k sums of swaps (the empty one first) are below that: k assignments are better. It is
    out too if k continuations of any hypotheses are better, whose totals are bounded against the first hypothesis.

    If one continuation of each hypothesis is left, it is that of full scoring: which beliefs two of them differ by does
    not hang on the draw, and what the clients' draws are off adds up as independent errors do.
    """  # (client, belief) bool, number
    num_clients, num_beliefs = mean.shape
    # Two-sided, over all pairs of beliefs (which of them are compared depends on the draw) and of continuations.
    comparisons = num_clients * max(num_beliefs * (num_beliefs - 1), 1) + 2 * (len(belief_of) - 1)
    quantile = torch.from_numpy(-scipy.special.stdtrit((num_looked - 1).clamp(min=1).numpy(), error / comparisons))
    left = (1 - num_looked / num_scored) / num_looked  # variance of the mean, without replacement
    unseen = (num_looked < 2) & (num_looked < num_scored)  # one example tells nothing of others, but all of itself
    variance, rows = covariance.diagonal(dim1=1, dim2=2), torch.arange(num_clients)[:, None]

    def gap_and_slack(one: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """How much less likely the others seem than one belief of each client, and how far that may be off."""
        difference = variance[rows, one] + variance[rows, others] - 2 * covariance[rows, one, others]
        slack = quantile[:, None] * (difference.clamp(min=0) * left[:, None]).sqrt()
        slack = slack.masked_fill(unseen[:, None], math.inf).masked_fill(one == others, 0.0)
        return scale[:, None] * (mean[rows, one] - mean[rows, others]), scale[:, None] * slack  # (client, belief)

    lows, own_limits, lowest, totals, unsure_of = [], [], [], [], []
    first_best: Tensor | None = None
    for beliefs, weight in zip(belief_of, log_weight.tolist(), strict=True):
        able = wanted[:, beliefs]
        best = beliefs[mean[:, beliefs].masked_fill(~able, -math.inf).argmax(1)][:, None]
        first_best = best if first_best is None else first_best
        gap, slack = gap_and_slack(best, beliefs.expand(num_clients, -1))
        low, high = (gap - slack).masked_fill(~able, math.inf), (gap + slack).masked_fill(~able, math.inf)
        least = low.amin(1, keepdim=True)
        swap = (high - least).sort(1).values[:, 1:2].flatten()
        sums = _subset_sums(swap, k)
        behind, unsure = gap_and_slack(first_best, best)
        lows.append(low)
        own_limits.append(sums[-1] if len(sums) == k else math.inf)
        lowest.append(float((behind - unsure + least).sum()) - weight)
        totals += [float((behind + unsure).sum()) - weight + extra for extra in sums]
        unsure_of.append(float(unsure.square().sum().sqrt()))
    kth_total = sorted(totals)[k - 1] if len(totals) >= k else math.inf
    kept = torch.zeros_like(wanted)
    for beliefs, low, own_limit, total in zip(belief_of, lows, own_limits, lowest, strict=True):
        # What may be a hypothesis' best is never out: it may keep a place for its start.
        limit = min(own_limit, max(0.0, kth_total - total))
        kept[:, beliefs] |= low <= limit * (1 + ROUNDING) + ROUNDING
    kept &= wanted
    alone = len(belief_of) <= k and bool((kept[:, belief_of].sum(2) == 1).all())
    return kept, max(unsure_of) if alone else math.inf


def _subset_sums(values: Tensor, k: int) -> list[float]:
    """The k smallest sums of a subset of non-negative values, the empty one first; fewer if there are fewer."""
    values = values[values.isfinite()]
    if k == 1 or len(values) == 0:
        return [0.0]
    totals: list[float] = k_best_assignments(torch.stack([torch.zeros_like(values), values], 1), k)[1].tolist()
    return totals
