"""Targets that are times until an event, which may not have come while somebody looked: (time, event) in two columns.

Event is 1 where it came at that time, 0 where it had not come by then.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions import LogNormal as TorchLogNormal
from torch.distributions import Weibull as TorchWeibull

from bcfl.likelihood.real import scale_of

NUM_INTERVALS = 10  # of the hazard, where nobody says which
LARGEST_LOG = 30.0  # of a cumulative hazard


@dataclass(frozen=True)
class Weibull:
    """Times of a Weibull distribution; the network gives the logarithm of its scale, in units; the shape is learned."""

    unit: float | None = None  # of time; left open: the mean of the times

    name: ClassVar[str] = "weibull"
    discrete: ClassVar[bool] = False
    kind: ClassVar[str] = "times"
    shifted_by: ClassVar[tuple[str, ...]] = ("offset",)

    @property
    def num_outputs(self) -> int:
        return 1

    def initial(self) -> Tensor:
        return torch.zeros(1)

    def check(self, y: Tensor, who: str) -> Tensor:
        return times(y, who)

    def fitted(self, y: Tensor) -> "Weibull":
        return replace(self, unit=unit_of(y, self.unit))

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        z, shape = self._parts(output, y[:, 0])
        return y[:, 1] * (shape.log() - y[:, 0].log() + z) - z.clamp(max=LARGEST_LOG).exp()

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """shape² · the cumulative hazard: as observed, since who is censored when is not known beforehand."""
        z, shape = self._parts(output, y[:, 0])
        return (shape.square() * z.clamp(max=LARGEST_LOG).exp())[..., None, None]

    def distribution(self, output: Tensor) -> Distribution:
        scale = output[..., 0].exp() * (self.unit or 1.0)
        return TorchWeibull(scale, scale_of(output[..., 1]).expand(scale.shape), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        shape = scale_of(output[..., 1])
        return (output[..., 0] + (1 + 1 / shape).lgamma()).exp() * (self.unit or 1.0)

    def survival(self, output: Tensor, at: Tensor) -> Tensor:
        """P(time > at)."""  # (time,) -> (time, ..., example)
        z, _ = self._parts(output[None], at.reshape(-1, *[1] * (output.dim() - 1)))
        return (-z.clamp(max=LARGEST_LOG).exp()).exp()

    def _parts(self, output: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the cumulative hazard, and the shape."""
        shape = scale_of(output[..., 1])
        return shape * ((time / (self.unit or 1.0)).log() - output[..., 0]), shape


@dataclass(frozen=True)
class LogNormal:
    """Times whose logarithms have normal noise of a learned scale; the network gives their mean, in units."""

    unit: float | None = None

    name: ClassVar[str] = "lognormal"
    discrete: ClassVar[bool] = False
    kind: ClassVar[str] = "times"
    shifted_by: ClassVar[tuple[str, ...]] = ("offset",)

    @property
    def num_outputs(self) -> int:
        return 1

    def initial(self) -> Tensor:
        return torch.zeros(1)

    def check(self, y: Tensor, who: str) -> Tensor:
        return times(y, who)

    def fitted(self, y: Tensor) -> "LogNormal":
        return replace(self, unit=unit_of(y, self.unit))

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        z, scale = self._parts(output, y[:, 0])
        density = -0.5 * z.square() - 0.5 * math.log(2 * math.pi) - scale.log() - y[:, 0].log()
        return torch.where(y[:, 1] > 0, density, torch.special.log_ndtr(-z))

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """1/scale², or of a censored time what its survival bends: λ (λ − z)/scale², λ = φ(z)/Φ(−z)."""
        z, scale = self._parts(output, y[:, 0])
        ratio = (-0.5 * z.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(-z)).exp()
        bend = torch.where(y[:, 1] > 0, torch.ones_like(z), ratio * (ratio - z))
        return (bend / scale.square())[..., None, None]

    def distribution(self, output: Tensor) -> Distribution:
        mean = output[..., 0] + math.log(self.unit or 1.0)
        return TorchLogNormal(mean, scale_of(output[..., 1]).expand(mean.shape), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        return (output[..., 0] + scale_of(output[..., 1]).square() / 2).exp() * (self.unit or 1.0)

    def survival(self, output: Tensor, at: Tensor) -> Tensor:
        z, _ = self._parts(output[None], at.reshape(-1, *[1] * (output.dim() - 1)))
        found: Tensor = torch.special.ndtr(-z)
        return found

    def _parts(self, output: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        scale = scale_of(output[..., 1])
        return ((time / (self.unit or 1.0)).log() - output[..., 0]) / scale, scale


@dataclass(frozen=True)
class Hazard:
    """Times in intervals that end at `edges`; the network gives the log odds of the event in each, if not before.

    What is censored in an interval counts as having survived those before it; what lies beyond the last edge, all.
    """

    edges: tuple[float, ...] | None = None  # left open: so that events fall into ten intervals alike

    name: ClassVar[str] = "hazard"
    discrete: ClassVar[bool] = True
    kind: ClassVar[str] = "times"
    shifted_by: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        edges = self.edges
        if edges is not None and (not edges or edges[0] <= 0 or list(edges) != sorted(set(edges))):
            raise ValueError(f"likelihood hazard: edges must rise from above 0, got {edges}")

    @property
    def num_outputs(self) -> int:
        return NUM_INTERVALS if self.edges is None else len(self.edges)

    def initial(self) -> Tensor:
        return torch.zeros(0)

    def check(self, y: Tensor, who: str) -> Tensor:
        return times(y, who)

    def fitted(self, y: Tensor) -> "Hazard":
        if self.edges is not None:
            return self
        came = y[y[:, 1] > 0, 0] if bool((y[:, 1] > 0).any()) else y[:, 0]
        found = came.double().quantile(torch.linspace(0, 1, NUM_INTERVALS + 1, dtype=torch.float64)[1:]).tolist()
        found[-1] = max(found[-1], float(y[:, 0].max())) * 1.001
        edges = sorted({float(f"{edge:.4g}") for edge in found})
        return Hazard(tuple(edges))

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        place, edges = self._place(y[:, 0], output)
        survived = torch.arange(len(edges)) < place[:, None]  # (example, interval)
        here = (torch.arange(len(edges)) == place[:, None]) & (y[:, 1:2] > 0)
        return (F.logsigmoid(-output) * survived + F.logsigmoid(output) * here).sum(-1)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """diag(h (1 − h)) of the intervals at whose beginning the event had not come."""
        place, edges = self._place(y[:, 0], output)
        risky = torch.arange(len(edges)) < place[:, None]
        risky |= (torch.arange(len(edges)) == place[:, None]) & (y[:, 1:2] > 0)
        hazard = output.sigmoid()
        return (hazard * (1 - hazard) * risky).diag_embed()

    def distribution(self, output: Tensor) -> None:
        return None

    def mean(self, output: Tensor) -> Tensor:
        """The mean of the time within the edges: the area under the survival curve up to the last one."""
        edges = F.pad(torch.tensor(self.edges), (1, 0))
        upto = F.pad(F.logsigmoid(-output).cumsum(-1), (1, 0)).exp()
        return (edges.diff() * (upto[..., 1:] + upto[..., :-1]) / 2).sum(-1)

    def survival(self, output: Tensor, at: Tensor) -> Tensor:
        """P(time > at): within an interval the hazard is the same all the time."""
        edges = F.pad(torch.tensor(self.edges, dtype=at.dtype), (1, 0))
        part = ((at[:, None] - edges[:-1]) / edges.diff()).clamp(0, 1).to(output.dtype)  # (time, interval)
        part = part.reshape(len(at), *[1] * (output.dim() - 1), -1)
        return (F.logsigmoid(-output) * part).sum(-1).exp()

    def _place(self, time: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of each time."""
        edges = torch.tensor(self.edges, dtype=time.dtype)
        return (time[:, None] > edges).sum(-1), edges


def times(y: Tensor, who: str) -> Tensor:
    """(time, event) as float32."""
    if y.dim() != 2 or y.shape[1] != 2:
        told = "time and event (1 if it came, 0 if not)"
        raise ValueError(f"{who}: y must hold two columns, {told}, but its shape is {tuple(y.shape)}")
    y = y.float()
    if not y.isfinite().all() or bool((y[:, 0] <= 0).any()):
        raise ValueError(f"{who}: y must hold finite times > 0")
    if bool(((y[:, 1] != 0) & (y[:, 1] != 1)).any()):
        raise ValueError(f"{who}: y must hold 1 where the event came and 0 where it did not, in its second column")
    return y


def unit_of(y: Tensor, unit: float | None) -> float:
    return float(f"{float(y[:, 0].double().mean()):.4g}") if unit is None else unit
