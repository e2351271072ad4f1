"""Targets with a class at many places: the pixels of an image, the tokens of a text.

Neighbouring places say much the same, so an example counts the mean of its places, not their sum; with `total` it is
their sum, as if they were independent. A label below 0 (−100, say) is at a place that does not count.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution


@dataclass(frozen=True)
class Pixels:
    """y is (example, height, width) of classes; the network gives (example, class, height, width) of scores."""

    total: bool = False

    name: ClassVar[str] = "pixels"
    discrete: ClassVar[bool] = True
    kind: ClassVar[str] = "pixels"
    shifted_by: ClassVar[tuple[str, ...]] = ()

    @property
    def num_outputs(self) -> int | None:
        return None

    def initial(self) -> Tensor:
        return torch.zeros(0)

    def check(self, y: Tensor, who: str) -> Tensor:
        return labels_at_places(y, who, 3, "(example, height, width)")

    def fitted(self, y: Tensor) -> "Pixels":
        return self

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        return of_places(output.movedim(-3, -1).flatten(-3, -2), y.flatten(1), self.total)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        raise ValueError("the information of pixels is not made: an example has too many outputs")

    def distribution(self, output: Tensor) -> Distribution:
        return TorchCategorical(logits=output.movedim(-3, -1), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        return output.softmax(-3)


@dataclass(frozen=True)
class Tokens:
    """y is (example, position) of tokens, the next or the masked ones; the network gives (example, position, token)."""

    total: bool = False

    name: ClassVar[str] = "tokens"
    discrete: ClassVar[bool] = True
    kind: ClassVar[str] = "tokens"
    shifted_by: ClassVar[tuple[str, ...]] = ()

    @property
    def num_outputs(self) -> int | None:
        return None

    def initial(self) -> Tensor:
        return torch.zeros(0)

    def check(self, y: Tensor, who: str) -> Tensor:
        return labels_at_places(y, who, 2, "(example, position)")

    def fitted(self, y: Tensor) -> "Tokens":
        return self

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        return of_places(output, y, self.total)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        raise ValueError("the information of tokens is not made: an example has too many outputs")

    def distribution(self, output: Tensor) -> Distribution:
        return TorchCategorical(logits=output, validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        return output.softmax(-1)


def labels_at_places(y: Tensor, who: str, dims: int, shape: str) -> Tensor:
    if y.dim() != dims or y.is_complex() or (y.is_floating_point() and bool((y != y.round()).any())):
        raise ValueError(f"{who}: y must hold whole numbers of shape {shape}, but is {y.dtype} of {tuple(y.shape)}")
    return y.long()


def of_places(output: Tensor, y: Tensor, total: bool) -> Tensor:
    """The mean (or sum) of the log-probabilities of the labels that count."""  # (..., example, place, class)
    counted = y >= 0
    label = y.clamp(min=0).expand(output.shape[:-1])
    log_p = output.log_softmax(-1).gather(-1, label[..., None])[..., 0] * counted
    return log_p.sum(-1) if total else log_p.sum(-1) / counted.sum(-1).clamp(min=1)
