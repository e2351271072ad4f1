"""Targets that are counts."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions import NegativeBinomial as TorchNegativeBinomial
from torch.distributions import Poisson as TorchPoisson

LARGEST_LOG = 30.0  # of a rate: beyond it nothing is counted
LOG_DISPERSION = (-12.0, 12.0)  # its bounds


@dataclass(frozen=True)
class Poisson:
    """y is a count; the network gives the logarithm of its rate."""

    name: ClassVar[str] = "poisson"
    discrete: ClassVar[bool] = True
    kind: ClassVar[str] = "counts"
    shifted_by: ClassVar[tuple[str, ...]] = ("offset", "exposure")

    @property
    def num_outputs(self) -> int:
        return 1

    def initial(self) -> Tensor:
        return torch.zeros(0)

    def check(self, y: Tensor, who: str) -> Tensor:
        return counts(y, who)

    def fitted(self, y: Tensor) -> "Poisson":
        return self

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        log_rate = output[..., 0]
        return y * log_rate - log_rate.clamp(max=LARGEST_LOG).exp() - (y + 1).lgamma()

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """The rate."""
        return self.mean(output)[..., None, None]

    def distribution(self, output: Tensor) -> Distribution:
        return TorchPoisson(self.mean(output), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        return output[..., 0].clamp(max=LARGEST_LOG).exp()

    def cdf(self, output: Tensor, at: Tensor) -> Tensor:
        return torch.as_tensor(_scipy().poisson.cdf(at.numpy(), self.mean(output)[..., None].numpy()))

    def quantiles(self, output: Tensor, levels: Tensor) -> Tensor:
        mean = self.mean(output)[..., None]
        return torch.as_tensor(_scipy().poisson.ppf(levels.reshape(-1, *[1] * mean.dim()).numpy(), mean.numpy()))

    def deviance(self, mean: Tensor, y: Tensor, output: Tensor) -> Tensor:
        """2 (y log(y/mean) − (y − mean))."""
        return 2 * (torch.xlogy(y, y / mean) - (y - mean))


@dataclass(frozen=True)
class NegativeBinomial:
    """y is a count; the network gives the logarithm of its mean; its variance is mean + dispersion · mean².

    The logarithm of the dispersion is learned.
    """

    name: ClassVar[str] = "negative_binomial"
    discrete: ClassVar[bool] = True
    kind: ClassVar[str] = "counts"
    shifted_by: ClassVar[tuple[str, ...]] = ("offset", "exposure")

    @property
    def num_outputs(self) -> int:
        return 1

    def initial(self) -> Tensor:
        return torch.full((1,), -1.0)

    def check(self, y: Tensor, who: str) -> Tensor:
        return counts(y, who)

    def fitted(self, y: Tensor) -> "NegativeBinomial":
        return self

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        mean, size = self.mean(output), self._size(output)
        of_counts = (y + size).lgamma() - size.lgamma() - (y + 1).lgamma()
        return of_counts - size * torch.log1p(mean / size) - y * torch.log1p(size / mean)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """mean / (1 + dispersion · mean)."""
        mean = self.mean(output)
        return (mean / (1 + mean / self._size(output)))[..., None, None]

    def distribution(self, output: Tensor) -> Distribution:
        mean, size = self.mean(output), self._size(output)
        return TorchNegativeBinomial(size, logits=(mean / size).log(), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        return output[..., 0].clamp(-LARGEST_LOG, LARGEST_LOG).exp()

    def cdf(self, output: Tensor, at: Tensor) -> Tensor:
        mean, size = self.mean(output)[..., None], self._size(output)[..., None]
        return torch.as_tensor(_scipy().nbinom.cdf(at.numpy(), size.numpy(), (size / (size + mean)).numpy()))

    def quantiles(self, output: Tensor, levels: Tensor) -> Tensor:
        mean, size = self.mean(output)[..., None], self._size(output)[..., None]
        shaped = levels.reshape(-1, *[1] * mean.dim()).numpy()
        return torch.as_tensor(_scipy().nbinom.ppf(shaped, size.numpy(), (size / (size + mean)).numpy()))

    def deviance(self, mean: Tensor, y: Tensor, output: Tensor) -> Tensor:
        """2 (y log(y/mean) − (y + size) log((y + size)/(mean + size)))."""
        size = self._size(output)
        return 2 * (torch.xlogy(y, y / mean) - (y + size) * ((y + size) / (mean + size)).log())

    def _size(self, output: Tensor) -> Tensor:
        """1 / dispersion."""
        return (-output[..., 1].clamp(*LOG_DISPERSION)).exp()


def _scipy() -> Any:
    """scipy.stats, which takes half a second to import, and only a measure of counts needs it."""
    import scipy.stats

    return scipy.stats


def counts(y: Tensor, who: str) -> Tensor:
    """Counts as float32."""
    y = y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y
    if y.dim() != 1:
        raise ValueError(f"{who}: y must hold one count for each example, not {tuple(y.shape)}")
    y = y.float()
    if not y.isfinite().all() or bool((y < 0).any() or (y != y.round()).any()):
        raise ValueError(f"{who}: y must hold whole numbers ≥ 0, as they are counts")
    return y
