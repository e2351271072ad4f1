"""Targets that are real values."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions import Normal as TorchNormal
from torch.distributions import StudentT as TorchStudentT

LEAST_SCALE = 1e-3  # of the noise, in units of `spread`: a density without bound would reward a scale of 0
LARGEST_LOG = 20.0  # of a scale: beyond it exp overflows in products


def scale_of(log_scale: Tensor) -> Tensor:
    """exp, bounded from below and above."""
    return log_scale.clamp(max=LARGEST_LOG).exp() + LEAST_SCALE


@dataclass(frozen=True)
class Normal:
    """y is a real value or a row of them, with normal noise: y = center + spread · (output + scale · noise).

    The scale is learned, one for each value (its logarithm is an unknown), or the network's own further outputs, one
    logarithm for each value. `center` and `spread` are the units in which the network works.
    """

    values: int = 1
    scale: str = "learned"
    center: float | None = None  # left open: the mean of y, and its standard deviation
    spread: float | None = None

    name: ClassVar[str] = "normal"
    discrete: ClassVar[bool] = False
    kind: ClassVar[str] = "real"
    shifted_by: ClassVar[tuple[str, ...]] = ("offset",)  # in the network's units

    def __post_init__(self) -> None:
        if self.scale not in ("learned", "network"):
            raise ValueError(f"likelihood normal: scale must be learned or network, got {self.scale!r}")
        check_units("normal", self.center, self.spread)

    @property
    def num_outputs(self) -> int:
        return self.values * (2 if self.scale == "network" else 1)

    def initial(self) -> Tensor:
        return torch.zeros(0 if self.scale == "network" else self.values)

    def check(self, y: Tensor, who: str) -> Tensor:
        return real_values(y, who)

    def fitted(self, y: Tensor) -> "Normal":
        center, spread = units_of(y, self.center, self.spread)
        return replace(self, values=num_values(y), center=center, spread=spread)

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        mean, scale = self._parts(output)
        z = (in_units(y.reshape(len(y), -1), self) - mean) / scale
        density = 0.5 * z.square() + scale.log() + 0.5 * math.log(2 * math.pi)
        return -(density + math.log(units_in(self)[1])).sum(-1)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """diag(1/scale²), and for a logarithm of a scale 2 (∂scale)²/scale²."""
        mean, scale = self._parts(output)
        of_mean = scale.square().reciprocal().expand(mean.shape)
        if self.scale == "learned":
            return of_mean.diag_embed()
        slope = scale - LEAST_SCALE
        return torch.cat([of_mean, 2 * (slope / scale).square()], -1).diag_embed()

    def distribution(self, output: Tensor) -> Distribution:
        mean, scale = self._parts(output)
        mean, scale = from_units(mean, self), units_in(self)[1] * scale
        if self.values == 1:
            mean, scale = mean[..., 0], scale[..., 0]
        return TorchNormal(mean, scale.expand(mean.shape), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        mean = from_units(output[..., : self.values], self)
        return mean[..., 0] if self.values == 1 else mean

    def cdf(self, output: Tensor, at: Tensor) -> Tensor:
        """P(y ≤ at), value by value."""  # (..., example, value) twice
        mean, scale = self._parts(output)
        found: Tensor = torch.special.ndtr((in_units(at, self) - mean) / scale)
        return found

    def quantiles(self, output: Tensor, levels: Tensor) -> Tensor:
        """Where P(y ≤ q) is each of the levels."""  # (level,) -> (level, ..., example, value)
        mean, scale = self._parts(output)
        z = torch.special.ndtri(levels).reshape(-1, *[1] * mean.dim())
        return from_units(mean + scale * z, self)

    def _parts(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale in the network's units."""  # (..., example, value) each
        return output[..., : self.values], scale_of(output[..., self.values :])


@dataclass(frozen=True)
class StudentT:
    """Like normal noise with a learned scale, but with heavier tails, by `degrees` of freedom: for outliers."""

    values: int = 1
    degrees: float = 4.0
    center: float | None = None
    spread: float | None = None

    name: ClassVar[str] = "student_t"
    discrete: ClassVar[bool] = False
    kind: ClassVar[str] = "real"
    shifted_by: ClassVar[tuple[str, ...]] = ("offset",)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.degrees) and self.degrees > 0):
            raise ValueError(f"likelihood student_t: degrees must be finite and > 0, got {self.degrees}")
        check_units("student_t", self.center, self.spread)

    @property
    def num_outputs(self) -> int:
        return self.values

    def initial(self) -> Tensor:
        return torch.zeros(self.values)

    def check(self, y: Tensor, who: str) -> Tensor:
        return real_values(y, who)

    def fitted(self, y: Tensor) -> "StudentT":
        center, spread = units_of(y, self.center, self.spread)
        return replace(self, values=num_values(y), center=center, spread=spread)

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        mean, scale = self._parts(output)
        z, nu = (in_units(y.reshape(len(y), -1), self) - mean) / scale, self.degrees
        constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
        density = constant - scale.log() - (nu + 1) / 2 * torch.log1p(z.square() / nu)
        return (density - math.log(units_in(self)[1])).sum(-1)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """diag((ν + 1) / ((ν + 3) scale²))."""
        mean, scale = self._parts(output)
        share = (self.degrees + 1) / (self.degrees + 3)
        return (share / scale.square()).expand(mean.shape).diag_embed()

    def distribution(self, output: Tensor) -> Distribution:
        mean, scale = self._parts(output)
        mean, scale = from_units(mean, self), units_in(self)[1] * scale
        if self.values == 1:
            mean, scale = mean[..., 0], scale[..., 0]
        return TorchStudentT(self.degrees, mean, scale.expand(mean.shape), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        mean = from_units(output[..., : self.values], self)
        return mean[..., 0] if self.values == 1 else mean

    def cdf(self, output: Tensor, at: Tensor) -> Tensor:
        mean, scale = self._parts(output)
        z = ((in_units(at, self) - mean) / scale).numpy()
        return torch.as_tensor(scipy.special.stdtr(self.degrees, z))

    def quantiles(self, output: Tensor, levels: Tensor) -> Tensor:
        mean, scale = self._parts(output)
        z = torch.as_tensor(scipy.special.stdtrit(self.degrees, levels.numpy())).reshape(-1, *[1] * mean.dim())
        return from_units(mean + scale * z, self)

    def _parts(self, output: Tensor) -> tuple[Tensor, Tensor]:
        return output[..., : self.values], scale_of(output[..., self.values :])


@dataclass(frozen=True)
class Quantile:
    """y is a real value; the network gives its quantiles at `levels`.

    Each level is an asymmetric Laplace density around its quantile, whose maximum is where the pinball loss is least;
    an example counts their mean. The scale of all of them is learned.
    """

    levels: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)
    center: float | None = None
    spread: float | None = None

    name: ClassVar[str] = "quantile"
    discrete: ClassVar[bool] = False
    kind: ClassVar[str] = "real"
    shifted_by: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not self.levels or list(self.levels) != sorted(set(self.levels)) or not all(0 < q < 1 for q in self.levels):
            raise ValueError(f"likelihood quantile: levels must rise between 0 and 1, got {self.levels}")
        check_units("quantile", self.center, self.spread)

    @property
    def num_outputs(self) -> int:
        return len(self.levels)

    def initial(self) -> Tensor:
        return torch.full((1,), -1.0)

    def check(self, y: Tensor, who: str) -> Tensor:
        y = real_values(y, who)
        if y.dim() != 1:
            raise ValueError(f"{who}: y must hold one value for each example, not {tuple(y.shape)}")
        return y

    def fitted(self, y: Tensor) -> "Quantile":
        center, spread = units_of(y, self.center, self.spread)
        return replace(self, center=center, spread=spread)

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        quantiles, scale = output[..., :-1], scale_of(output[..., -1:])
        level = output.new_tensor(self.levels)
        apart = in_units(y[:, None], self) - quantiles
        pinball = level * apart + F.relu(-apart)
        density = (level * (1 - level)).log() - scale.log() - pinball / scale
        return density.mean(-1) - math.log(units_in(self)[1])

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """diag(τ (1 − τ) / scale²) over the number of levels."""
        level = output.new_tensor(self.levels)
        found = level * (1 - level) / scale_of(output[..., -1:]).square() / len(self.levels)
        return found.expand(*output.shape[:-1], -1).diag_embed()

    def distribution(self, output: Tensor) -> None:
        return None

    def mean(self, output: Tensor) -> Tensor:
        """The median, between the nearest levels."""
        return self.quantiles(output, torch.tensor([0.5]))[0, ..., 0]

    def cdf(self, output: Tensor, at: Tensor) -> Tensor:
        """Straight lines between the levels, and as far beyond the outermost as a level is from its end."""
        known, level = self._known(output)  # (..., example, knot)
        at = at[..., 0].expand(known.shape[:-1])
        last = (known < at[..., None]).sum(-1).clamp(1, len(level) - 1)
        left, right = (known.gather(-1, place[..., None])[..., 0] for place in (last - 1, last))
        share = ((at - left) / (right - left).clamp(min=1e-12)).clamp(0, 1)
        return (level[last - 1] + share * (level[last] - level[last - 1]))[..., None]

    def quantiles(self, output: Tensor, levels: Tensor) -> Tensor:
        known, level = self._known(output)
        found = []
        for wanted in levels.tolist():
            last = int((level < wanted).sum().clamp(1, len(level) - 1))
            share = (wanted - float(level[last - 1])) / float(level[last] - level[last - 1])
            found.append(known[..., last - 1].lerp(known[..., last], min(max(share, 0.0), 1.0)))
        return torch.stack(found)[..., None]

    def _known(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Quantiles in order, with an end on either side, and their levels."""
        inner = from_units(output[..., :-1].sort(-1).values, self)
        level = torch.tensor(self.levels, dtype=output.dtype)
        reach = scale_of(output[..., -1:]) * units_in(self)[1]
        ends = inner[..., :1] - reach, inner[..., -1:] + reach
        return torch.cat([ends[0], inner, ends[1]], -1), torch.cat([level.new_zeros(1), level, level.new_ones(1)])


def real_values(y: Tensor, who: str) -> Tensor:
    """Real targets as float32."""
    if y.dim() not in (1, 2):
        raise ValueError(f"{who}: y must hold a value or a row of values for each example, not {tuple(y.shape)}")
    if y.is_complex() or not y.float().isfinite().all():
        raise ValueError(f"{who}: y holds values that are not finite real numbers")
    return (y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y).float()


def num_values(y: Tensor) -> int:
    return y.shape[1] if y.dim() == 2 else 1


class InUnits(Protocol):
    """A family that works in units of its own."""

    @property
    def center(self) -> float | None: ...

    @property
    def spread(self) -> float | None: ...


def units_in(family: InUnits) -> tuple[float, float]:
    return family.center or 0.0, family.spread or 1.0


def in_units(y: Tensor, family: InUnits) -> Tensor:
    center, spread = units_in(family)
    return (y - center) / spread


def from_units(value: Tensor, family: InUnits) -> Tensor:
    center, spread = units_in(family)
    return center + spread * value


def units_of(y: Tensor, center: float | None, spread: float | None) -> tuple[float, float]:
    """Center and spread as given, or, where they were left open, the targets' own, rounded."""
    deviation = float(y.double().std()) if len(y) > 1 else 0.0
    center = _rounded(float(y.double().mean())) if center is None else center
    return center, (_rounded(deviation) if deviation > 0 else 1.0) if spread is None else spread


def check_units(name: str, center: float | None, spread: float | None) -> None:
    center, spread = 0.0 if center is None else center, 1.0 if spread is None else spread
    if not (math.isfinite(center) and math.isfinite(spread) and spread > 0):
        raise ValueError(f"likelihood {name}: center must be finite and spread finite and > 0, got {center}, {spread}")


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
