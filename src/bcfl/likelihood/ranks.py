"""Measures of order: they need all of a client's examples at once, and are no sums over them."""

import math

import torch
from torch import Tensor

Measured = tuple[float, float]  # a value and its standard error; NaN where there is none
UNKNOWN: Measured = (math.nan, math.nan)


def auc(score: Tensor, positive: Tensor) -> Measured:
    """How likely a positive example has the higher score (a draw counts half), by Mann and Whitney.

    The standard error is that of Hanley and McNeil (1982).
    """
    num, rest = int(positive.sum()), int((~positive).sum())
    if not num or not rest:
        return UNKNOWN
    values, place, count = score.double().unique(return_inverse=True, return_counts=True)
    del values
    rank = count.cumsum(0) - (count - 1) / 2  # of draws, their mean
    area = (float(rank[place][positive].sum()) - num * (num + 1) / 2) / (num * rest)
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = (area * (1 - area) + (num - 1) * (q1 - area**2) + (rest - 1) * (q2 - area**2)) / (num * rest)
    return area, math.sqrt(max(variance, 0.0))


def sensitivity(score: Tensor, positive: Tensor, specificity: float) -> Measured:
    """The share of positives found where at most 1 − specificity of the others are taken for such."""
    if not bool(positive.any()) or bool(positive.all()):
        return UNKNOWN
    threshold = score[~positive].double().quantile(specificity, interpolation="higher")
    share = float((score[positive].double() > threshold).double().mean())
    return share, math.sqrt(share * (1 - share) / int(positive.sum()))


def concordance(time: Tensor, event: Tensor, predicted: Tensor) -> Measured:
    """Harrell's C: of the pairs whose order is known, the share in which the longer prediction lives longer."""
    earlier = (time[:, None] < time[None]) & (event[:, None] > 0)  # the first of the pair had its event before
    earlier |= (time[:, None] == time[None]) & (event[:, None] > 0) & (event[None] == 0)
    right = (predicted[:, None] < predicted[None]).double() + 0.5 * (predicted[:, None] == predicted[None]).double()
    count = int(earlier.sum())
    return (float((right * earlier).sum()) / count, math.nan) if count else UNKNOWN


def integrated_brier(time: Tensor, event: Tensor, survival: Tensor, at: Tensor) -> Measured:
    """The mean over times of the squared error of P(time > t), each weighted against censoring (Graf and others 1999).

    Weights are 1/G: of an event at its time (just before it), of a survivor at t; G is the Kaplan-Meier curve of being
    censored.
    """  # survival (time, example)
    known = kaplan_meier(time, 1 - event)
    of_event = known(time, before=True).clamp(min=1e-6)
    dead = ((time <= at[:, None]) & (event > 0)).double() / of_event
    alive = (time > at[:, None]).double() / known(at, before=False).clamp(min=1e-6)[:, None]
    score = (survival.square() * dead + (1 - survival).square() * alive).mean(1)  # (time,)
    if len(at) < 2 or float(at[-1] - at[0]) <= 0:
        return UNKNOWN
    return float(torch.trapezoid(score, at) / (at[-1] - at[0])), math.nan


class kaplan_meier:  # noqa: N801
    """P(time > t) as it is estimated from times and whether the event came."""

    def __init__(self, time: Tensor, event: Tensor):
        self.at = time.double().unique()
        risky = (time.double()[None] >= self.at[:, None]).sum(1)
        came = ((time.double()[None] == self.at[:, None]) & (event[None] > 0)).sum(1)
        self.after = (1 - came / risky).cumprod(0)

    def __call__(self, t: Tensor, *, before: bool) -> Tensor:
        place = torch.searchsorted(self.at, t.double(), right=not before)
        return torch.cat([self.after.new_ones(1), self.after])[place]


def crps(atoms: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """The continuous ranked probability score of a distribution of atoms: E|X − y| − ½ E|X − X'|."""
    # (atom, example), (atom,), (example,) -> (example,)
    ordered, place = atoms.double().sort(0)
    weight = weight.double()[place]
    upto = weight.cumsum(0)
    spread = ((upto[:-1] * (1 - upto[:-1])) * ordered.diff(dim=0)).sum(0)  # ∫ F (1 − F)
    return (weight * (ordered - y).abs()).sum(0) - spread
