"""Targets that are counts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions import Poisson as TorchPoisson

LARGEST_LOG = 30.0  # of a rate: beyond it nothing is counted


@dataclass(frozen=True)
class Poisson:
    """y is a count; the network gives the logarithm of its rate."""

    name: ClassVar[str] = "poisson"
    discrete: ClassVar[bool] = True
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


def counts(y: Tensor, who: str) -> Tensor:
    """Counts as float32."""
    y = y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y
    if y.dim() != 1:
        raise ValueError(f"{who}: y must hold one count for each example, not {tuple(y.shape)}")
    y = y.float()
    if not y.isfinite().all() or bool((y < 0).any() or (y != y.round()).any()):
        raise ValueError(f"{who}: y must hold whole numbers ≥ 0, as they are counts")
    return y
