"""Fusion that a few clients cannot ruin: changes of an unusual size are cut, or the middle of all posteriors is taken.

A posterior is measured by four numbers: how far it has moved from its prior's mean and how sure it is, each over the
model's parameters and over what travels with them. What is usual is the median of these over a round's posteriors,
whatever beliefs they were trained from, so it holds while fewer than half of them lie. An honest change was at most 5.6
times as long as the median one where labels are badly skewed, an honest precision 14 times as high.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from bcfl.belief.gaussian import BLOCK, Gaussian, distinct

Robust = Literal["none", "clip", "median", "trimmed"]
ROBUST: tuple[str, ...] = get_args(Robust)
FURTHEST = 10.0  # times the median length a change may be
SUREST = 100.0  # times the median precision a posterior may have in sum
CLIP_AFTER = 16  # posteriors: the first ones wait until so many tell what is usual


@dataclass
class Usual:
    """What a round's posteriors have in common, as far as they have arrived."""

    num_parameters: int
    measured: list[Tensor] = field(default_factory=list)  # [posterior] (change and precision, part)

    def measure(self, posterior: Gaussian, start: Tensor, weight: float = 1.0) -> Tensor:
        """The length of the change and the sum of the precision of each part; from now on they count."""
        parts = []
        for part in self._parts():
            mean, precision = posterior.mean[part], posterior.precision[part]
            some = distinct(precision)
            total = float(some.sum(dtype=torch.float64)) * len(precision) / max(len(some), 1)
            parts.append([float((mean - start[part]).double().norm()), weight * total])
        self.measured.append(torch.tensor(parts, dtype=torch.float64).T)
        return self.measured[-1]

    def bounded(self, posterior: Gaussian, start: Tensor, measures: Tensor) -> Gaussian:
        """The posterior itself, if it is usual; a change that is too long, or a precision too high, becomes the median.

        Its own numbers, not a copy's, where there is nothing to cut.
        """
        median = torch.stack(self.measured).median(0).values  # (change and precision, part); of two the lower
        unusual = measures > torch.tensor([[FURTHEST], [SUREST]]) * median
        if not unusual.any():
            return posterior
        share = torch.where(unusual, median / measures, 1.0).tolist()
        mean, precision = posterior.mean.clone(), posterior.precision.clone()
        for part, of_change, of_precision in zip(self._parts(), *share, strict=True):
            mean[part] = torch.lerp(start[part], mean[part], of_change)
            precision[part] *= of_precision
        return Gaussian(mean, precision)

    def _parts(self) -> tuple[slice, slice]:
        return slice(self.num_parameters), slice(self.num_parameters, None)


def all_bounded(
    posteriors: Sequence[Gaussian], starts: Sequence[Tensor] | Tensor, num_parameters: int, robust: Robust
) -> list[Gaussian]:
    """The posteriors, each as far as it is usual among them; `starts` are the means of their priors."""
    if robust == "none":
        return list(posteriors)
    usual = Usual(num_parameters)
    measures = [usual.measure(*pair) for pair in zip(posteriors, starts, strict=True)]
    return [usual.bounded(*one) for one in zip(posteriors, starts, measures, strict=True)]


def no_farther(vectors: Tensor, starts: Tensor, robust: Robust) -> Tensor:
    """The vectors, none farther from its start than the median one: k-means gives who is far away its own cluster.

    As they are, unless the middle of a cluster is taken.
    """  # (client, number), (client or 1, number)
    if robust not in ("median", "trimmed"):
        return vectors
    length = (vectors - starts).double().norm(dim=1, keepdim=True)
    share = (length.median() / length.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)
    return torch.lerp(starts.expand_as(vectors), vectors, share.to(vectors.dtype))


def middle(rows: Sequence[Tensor], robust: Robust) -> Tensor:
    """The median of each coordinate, or its mean without the third at each end, every row counting the same."""
    cut = len(rows) // 3 if robust == "trimmed" else (len(rows) - 1) // 2
    result = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
    for begin in range(0, len(result), BLOCK):  # so that no second copy of all rows is made
        block = slice(begin, begin + BLOCK)
        ordered = torch.stack([row[block] for row in rows]).sort(0).values
        result[block] = ordered[cut : len(rows) - cut].mean(0)
    return result  # (coordinate,)


def middle_of(posteriors: Sequence[Gaussian], robust: Robust) -> Gaussian:
    """The posterior that has the middle of their means and of their precisions: as many of it stand for all of them."""
    means, precisions = zip(*((one.mean, one.precision) for one in posteriors), strict=True)
    return Gaussian(middle(means, robust), middle(precisions, robust))


def weight_of(num_examples: Tensor, robust: Robust) -> Tensor:
    """What clients that say how many examples they have count for: as many, if that is usual, or all the same."""
    if robust in ("median", "trimmed"):
        return torch.ones_like(num_examples)
    median = num_examples[num_examples > 0].median() if robust == "clip" else num_examples.max()
    return torch.where(num_examples > SUREST * median, median, num_examples)  # (client,)


def bounded_scores(log_likelihood: Tensor, robust: Robust) -> Tensor:
    """Scores under which no client's say about the joint weights is beyond the usual; each one's order stays as it is.

    How much worse than its best a client finds a belief counts up to the median client's span, with `clip` up to
    FURTHEST times that. What is impossible (−∞) stays so.
    """  # (client, ...)
    if robust == "none" or not len(log_likelihood):
        return log_likelihood
    rows = log_likelihood.flatten(1)
    best = rows.amax(1, keepdim=True)
    behind = torch.where(rows.isfinite(), best - rows, 0.0)
    most = behind.amax(1).median() * (FURTHEST if robust == "clip" else 1.0)
    return torch.where(rows.isfinite(), best - behind.clamp(max=most), rows).view_as(log_likelihood)
