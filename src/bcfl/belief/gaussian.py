"""Beliefs about a model's parameters: diagonal Gaussians, how to combine them and how to draw from them.

A coordinate with precision 0 is flat (nothing is known about it), one with infinite precision is a point.
The last axis is the parameter axis; any axes before it are a stack of independent beliefs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

FusionRule = Literal["product", "exact", "geometric", "pooled"]
BLOCK = 1 << 18  # numbers of each vector that are taken together where there are millions
FUSION_RULES: tuple[str, ...] = get_args(FusionRule)


@dataclass(frozen=True)
class Gaussian:
    """A diagonal Gaussian N(mean, 1 / precision), or a stack of them along the leading axes."""

    mean: Tensor  # (..., parameter)
    precision: Tensor  # (..., parameter), ≥ 0

    def __post_init__(self) -> None:
        if self.mean.shape != self.precision.shape or self.mean.dim() == 0:
            shapes = f"{tuple(self.mean.shape)} and {tuple(self.precision.shape)}"
            raise ValueError(f"mean and precision must have one shape (..., parameter), got {shapes}")
        if not (self.mean.is_floating_point() and self.mean.dtype == self.precision.dtype):
            types = f"{self.mean.dtype} and {self.precision.dtype}"
            raise ValueError(f"mean and precision must have one floating-point type, got {types}")
        # min() of a NaN is NaN, which is not < 0: a client's broken answer is caught by engines.client.is_usable.
        if self.precision.numel() and bool((least := distinct(self.precision).min()) < 0):
            raise ValueError(f"precision must be ≥ 0 everywhere, got {float(least)}")

    def __getitem__(self, index: Any) -> "Gaussian":
        return _known(self.mean[index], self.precision[index])

    def __len__(self) -> int:
        return len(self.mean)

    def __iter__(self) -> Iterator["Gaussian"]:
        return (self[i] for i in range(len(self)))

    @property
    def variance(self) -> Tensor:
        return self.precision.reciprocal()  # 1/0 = ∞ and 1/∞ = 0, as the two limits should be

    def is_finite(self) -> bool:
        """Whether every mean is finite and every precision is finite."""
        # NaN and ±∞ surface in the extremes, which are found without making a vector.
        extremes = [
            end for values in (self.mean, self.precision) if values.numel() for end in distinct(values).aminmax()
        ]
        return all(math.isfinite(end) for end in extremes)


def distinct(values: Tensor) -> Tensor:
    """The numbers of a tensor without the repetitions of an expanded one: the same extremes, without the work."""
    for axis, step in enumerate(values.stride()):
        values = values.narrow(axis, 0, 1) if step == 0 and values.shape[axis] else values
    return values


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same stretch of each of them: what is made of it on the way stays in the cache."""
    if vectors[0].shape[-1] <= BLOCK:
        return iter((vectors,))
    return zip(*(vector.split(BLOCK, -1) for vector in vectors), strict=True)


def _known(mean: Tensor, precision: Tensor) -> Gaussian:
    """A Gaussian that follows from one already checked: looking through 26 million precisions again takes its time."""
    belief = object.__new__(Gaussian)
    object.__setattr__(belief, "mean", mean)
    object.__setattr__(belief, "precision", precision)
    return belief


def flat(mean: Tensor) -> Gaussian:
    """A belief that knows nothing (precision 0), centred on `mean`."""
    return Gaussian(mean, mean.new_zeros(()).expand_as(mean))  # one zero stands for all: no vector to be looked through


def even(mean: Tensor, precision: float) -> Gaussian:
    """A belief with this precision, which is ≥ 0, in every coordinate."""
    return _known(mean, mean.new_full((), precision).expand_as(mean))


def stack(beliefs: Sequence[Gaussian]) -> Gaussian:
    """The beliefs along a new first axis."""
    return Gaussian(torch.stack([b.mean for b in beliefs]), torch.stack([b.precision for b in beliefs]))


def temper(belief: Gaussian, power: float) -> Gaussian:
    """p(ω)^power, renormalised: the same mean with its precision scaled by `power`."""
    if not (power >= 0 and math.isfinite(power)):
        raise ValueError(f"power must be a finite number ≥ 0, got {power}")
    if power == 1:
        return belief
    return _known(belief.mean, (distinct(belief.precision) * power).expand_as(belief.precision))


class Fusion:
    """The fusion of local posteriors that were computed from one shared prior, folded in as they arrive.

    Holds two vectors however many posteriors are added; they become the result's mean and precision, and lie in
    `into` if that is given. Writing Λ for precision and μ for mean, with Λ₀, μ₀ the prior's, n posteriors give
    (the paper, section 3.1):

        product     Λ = Σ Λⱼ                 Π p(ω|Dʲ): counts the shared prior n times
        exact       Λ = Λ₀ + Σ (Λⱼ − Λ₀)     the product divided by prior^(n−1): counts it once
        geometric   Λ = Σ Λⱼ / n             the product to the power 1/n
        mean        μ₀ + Σ Λⱼ (μⱼ − μ₀) / Λ  (for geometric: with the product's Λ)

        pooled      Λ = Σ Λⱼ / n             the mean is μ₀ + Σ (μⱼ − μ₀) / n

    `pooled` is `geometric` for posteriors that are thought to have one precision, of which each shows a noisy copy: no
    posterior can take the mean over by claiming a high one.

    Means are accumulated relative to μ₀: there the prior's own term vanishes for every rule, and large common
    offsets do not eat the digits. A coordinate about which nothing is known (Λ = 0) keeps the prior's mean, and so
    does everything when no posterior was added. Precisions must be finite.
    """

    def __init__(self, prior: Gaussian, rule: FusionRule, into: tuple[Tensor, Tensor] | None = None):
        if rule not in FUSION_RULES:
            raise ValueError(f"unknown fusion rule {rule!r}, allowed: {', '.join(FUSION_RULES)}")
        if not prior.is_finite():  # ∞ − ∞ would quietly become NaN
            raise ValueError("prior must have finite means and precisions")
        self._prior, self._rule, self.count = prior, rule, 0.0
        self._everywhere = 0.0  # what posteriors with one precision for all coordinates have of it, in sum
        # Σ Λⱼ (μⱼ − μ₀), without Λⱼ for pooled, and Σ Λⱼ. Begun with the first posterior: to write millions of zeros
        # beforehand is to wait for memory while nobody trains.
        self._shift, self._precision = into or (torch.empty_like(prior.mean), torch.empty_like(prior.mean))
        self._begun = False

    def add(self, posterior: Gaussian, weight: float = 1.0) -> None:
        """Fold in posterior^weight."""
        if posterior.mean.shape != self._prior.mean.shape:
            shapes = f"{tuple(posterior.mean.shape)} and {tuple(self._prior.mean.shape)}"
            raise ValueError(f"posterior and prior must have one shape, got {shapes}")
        prior = self._prior
        precisions = distinct(posterior.precision)
        constant = precisions.numel() == 1  # as of averaging methods: for millions of numbers one is added
        if constant:
            self._everywhere += weight * precisions.item()
        for shift, total, mean, precision, prior_mean, prior_precision in blocks(
            self._shift, self._precision, posterior.mean, posterior.precision, prior.mean, prior.precision
        ):
            if not self._begun:
                shift.zero_()
                total.copy_(prior_precision) if self._rule == "exact" else total.zero_()
            if not constant:
                total.add_(precision, alpha=weight)
            if self._rule == "exact":
                total.sub_(prior_precision, alpha=weight)
            if self._rule == "pooled":
                shift.add_(mean - prior_mean, alpha=weight)
            else:
                shift.addcmul_(precision, mean - prior_mean, value=weight)
        self._begun = True
        self.count += weight

    def result(self) -> Gaussian:
        """The fused belief, in the fold's own storage; the fold is used up."""
        if self.count == 0:
            self._shift.copy_(self._prior.mean)
            self._precision.copy_(self._prior.precision)
            return Gaussian(self._shift, self._precision)
        for shift, precision, prior_mean in blocks(self._shift, self._precision, self._prior.mean):
            if self._everywhere:
                precision.add_(self._everywhere)
            precision.clamp_(min=0)  # rounding may leave exact's difference a hair below zero
            shift.div_(self.count if self._rule == "pooled" else precision)
            if not bool(precision.min() > 0):  # filling takes twenty times as long as this look
                shift.masked_fill_(precision == 0, 0)
            shift.add_(prior_mean)
            if self._rule in ("geometric", "pooled"):
                precision.div_(self.count)
        return Gaussian(self._shift, self._precision)


def fuse(posteriors: Iterable[Gaussian], prior: Gaussian, rule: FusionRule) -> Gaussian:
    """One belief from local posteriors that share `prior`, by `rule` (see Fusion); no posterior gives the prior."""
    fold = Fusion(prior, rule)
    for j, posterior in enumerate(posteriors):
        if not posterior.is_finite():
            raise ValueError(f"posteriors[{j}] must have finite means and precisions")
        fold.add(posterior)
    return fold.result()


class Merging:
    """The Gaussian with the mean and variance of a mixture, per coordinate, folded in component by component.

        m = Σ φⱼ mⱼ        S = Σ φⱼ (Sⱼ + (mⱼ − m)²)          (appendix on MERGE)

    Weights are logarithms and relative to each other: no sum of them need be known beforehand. The spread is summed
    from centred means (Welford), so it is never negative. A flat component (precision 0) makes its coordinate flat;
    points (infinite precision) leave only the spread.
    """

    def __init__(self, like: Tensor):
        self._mean = torch.zeros_like(like)
        self._variance = torch.zeros_like(like)
        self._log_total = -math.inf  # of the weights so far

    def add(self, component: Gaussian, log_weight: float) -> None:
        if log_weight == -math.inf:
            return
        less, more = sorted((self._log_total, log_weight))
        log_total = more + math.log1p(math.exp(less - more))
        kept, share = math.exp(self._log_total - log_total), math.exp(log_weight - log_total)
        self._log_total = log_total
        # What has no weight beside the rest says nothing, and 0 · ∞ would be NaN: also where only float32 rounds to 0.
        nothing = torch.finfo(self._mean.dtype).tiny
        if share < nothing:
            return
        if kept < nothing:
            self._mean.zero_()
            self._variance.zero_()
        for mean, variance, own_mean, own_precision in blocks(
            self._mean, self._variance, component.mean, component.precision
        ):
            step = own_mean - mean
            mean.add_(step, alpha=share)
            variance.mul_(kept).add_(own_precision.reciprocal(), alpha=share)
            variance.addcmul_(step, step, value=share * kept)

    def result(self) -> Gaussian:
        """The merged belief; the fold is used up."""
        if self._log_total == -math.inf:
            raise ValueError("a merge needs at least one component with a positive weight")
        return Gaussian(self._mean, self._variance.reciprocal_())


def merge(components: Sequence[Gaussian] | Gaussian, log_weight: Tensor) -> Gaussian:
    """The moment-matched Gaussian of the mixture Σ φⱼ N(mⱼ, Sⱼ), φ = softmax(log_weight)."""
    shapes = {tuple(component.mean.shape) for component in components}
    if log_weight.shape != (len(components),) or len(shapes) != 1 or () in shapes:
        raise ValueError("log_weight must be (component,) beside components of one shape (..., parameter), at least "
                         f"one, got {tuple(log_weight.shape)} and {len(components)} of {sorted(shapes)}")  # fmt: skip
    if not log_weight.logsumexp(0).isfinite():
        raise ValueError("log_weight must not hold NaN or +∞, and at least one entry must be finite")
    fold = Merging(components[0].mean)
    for component, own in zip(components, log_weight.tolist(), strict=True):
        fold.add(component, own)
    return fold.result()


def _deviation(belief: Gaussian) -> Tensor:
    """The standard deviation, with 0 where the belief is flat: there is no distribution to draw from."""
    return torch.where(belief.precision > 0, belief.precision.rsqrt(), 0.0)


def sample(belief: Gaussian, num_samples: int, generator: torch.Generator) -> Tensor:
    """Independent draws from the belief; a flat coordinate stays at its mean."""  # (sample, ..., parameter)
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    noise = torch.randn((num_samples, *belief.mean.shape), generator=generator, dtype=belief.mean.dtype)
    return noise.mul_(_deviation(belief)).add_(belief.mean)


def sigma_points(belief: Gaussian, num_points: int) -> Tensor:
    """Equally weighted points μ ± σ∘s whose mean and variances are exactly the belief's, the same at every call.

    The sign patterns s are rows of a Hadamard matrix, s_l[p] = (−1)^popcount(l & p), so covariances between
    different coordinates vanish as well when num_points is a multiple of 2·2^⌈log₂ parameters⌉. With fewer points
    coordinates that lie a multiple of a power of two apart have one pattern, up to a sign that is drawn for each
    coordinate once and for all: so what a layer sums up, whose rows are a power of two long, varies as it should. With
    more points than patterns the patterns come again: moments beyond the second stay wrong, however many there are.
    `num_points` is even; a flat coordinate stays at its mean.
    """  # (point, ..., parameter)
    if num_points < 2 or num_points % 2:
        raise ValueError(f"num_points must be an even number ≥ 2, got {num_points}")
    half = num_points // 2
    bits = torch.arange(half)[:, None] & torch.arange(belief.mean.shape[-1])  # (pattern, parameter)
    shift = 32
    while shift:  # parity of the bits by folding the word onto itself
        bits = bits ^ (bits >> shift)
        shift //= 2
    own = torch.randint(2, (belief.mean.shape[-1],), generator=torch.Generator().manual_seed(0))  # (parameter,)
    signs = (1 - 2 * ((bits ^ own) & 1)).to(belief.mean.dtype)
    signs = signs.view(half, *[1] * (belief.mean.dim() - 1), -1)
    offset = signs * _deviation(belief)
    return torch.cat([belief.mean + offset, belief.mean - offset])


def log_density(belief: Gaussian, x: Tensor) -> Tensor:
    """log N(x; mean, 1/precision), summed over parameters; a flat coordinate contributes 0 (it is improper)."""
    if x.dim() == 0 or x.shape[-1] != belief.mean.shape[-1]:
        raise ValueError(f"x must be (..., {belief.mean.shape[-1]}) like the belief, got {tuple(x.shape)}")
    known = belief.precision > 0
    precision = torch.where(known, belief.precision, 1.0)
    terms = 0.5 * (precision.log() - math.log(2 * math.pi) - precision * (x - belief.mean).square())
    return torch.where(known, terms, 0.0).sum(-1)  # (...)
