"""Targets that are real values."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions import Normal as TorchNormal

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
    center: float = 0.0
    spread: float = 1.0

    name: ClassVar[str] = "normal"
    discrete: ClassVar[bool] = False
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
        z = ((y.reshape(len(y), -1) - self.center) / self.spread - mean) / scale
        return -(0.5 * z.square() + scale.log() + 0.5 * math.log(2 * math.pi) + math.log(self.spread)).sum(-1)

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
        mean, scale = self.center + self.spread * mean, self.spread * scale
        if self.values == 1:
            mean, scale = mean[..., 0], scale[..., 0]
        return TorchNormal(mean, scale.expand(mean.shape), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        mean = self.center + self.spread * output[..., : self.values]
        return mean[..., 0] if self.values == 1 else mean

    def _parts(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and scale in the network's units."""  # (..., example, value) each
        return output[..., : self.values], scale_of(output[..., self.values :])


def real_values(y: Tensor, who: str) -> Tensor:
    """Real targets as float32."""
    if y.dim() not in (1, 2):
        raise ValueError(f"{who}: y must hold a value or a row of values for each example, not {tuple(y.shape)}")
    if y.is_complex() or not y.float().isfinite().all():
        raise ValueError(f"{who}: y holds values that are not finite real numbers")
    return (y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y).float()


def num_values(y: Tensor) -> int:
    return y.shape[1] if y.dim() == 2 else 1


def units_of(y: Tensor, center: float, spread: float) -> tuple[float, float]:
    """Center and spread as given, or, where they were left as they are by default, the targets' own, rounded."""
    if (center, spread) != (0.0, 1.0) or y.dim() == 2 or len(y) < 2:
        return center, spread
    deviation = float(y.double().std())
    return _rounded(float(y.double().mean())), _rounded(deviation) if deviation > 0 else 1.0


def check_units(name: str, center: float, spread: float) -> None:
    if not (math.isfinite(center) and math.isfinite(spread) and spread > 0):
        raise ValueError(f"likelihood {name}: center must be finite and spread finite and > 0, got {center}, {spread}")


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
