"""A likelihood that somebody brings: any function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.func import grad, vmap

OWN = "own"


@dataclass(frozen=True)
class Own:
    """log p(y | output) is what a function of (output, y) says of each example; it must not mix examples."""

    function: Callable[[Tensor, Tensor], Tensor] | None = None  # None: it is attached to the model already

    name: ClassVar[str] = OWN
    discrete: ClassVar[bool] = False
    kind: ClassVar[str] = "own"
    shifted_by: ClassVar[tuple[str, ...]] = ("offset",)

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise ValueError(f"likelihood must be a name, what likelihood.of returns, or a function (output, y) -> "
                             f"log-probability of each example, got {type(self.function).__name__}")  # fmt: skip

    @property
    def num_outputs(self) -> int | None:
        return None

    def initial(self) -> Tensor:
        return torch.zeros(0)

    def check(self, y: Tensor, who: str) -> Tensor:
        if y.dim() == 0 or y.is_complex() or not y.isfinite().all():
            raise ValueError(f"{who}: y must hold finite real numbers, a row of them or one for each example")
        return y.float() if y.is_floating_point() else y.long()

    def fitted(self, y: Tensor) -> "Own":
        return self

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        assert self.function is not None
        return self.function(output, y)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """The square of the gradient: what is known of a function without its expectation."""
        assert output.dim() == 2  # (example, output)

        def one(output: Tensor, y: Tensor) -> Tensor:
            return self.log_prob(output[None], y[None])[0]

        slope: Tensor = vmap(grad(one))(output, y)
        return slope[:, :, None] * slope[:, None, :]

    def distribution(self, output: Tensor) -> Distribution | None:
        return None

    def mean(self, output: Tensor) -> Tensor:
        return output
