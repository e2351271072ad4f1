"""Targets that are classes, or yes-or-no labels."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution


@dataclass(frozen=True)
class Categorical:
    """y is a class from 0; the network gives a score for each: p = softmax."""

    class_weight: tuple[float, ...] | None = None  # log p of class c counts so often

    name: ClassVar[str] = "categorical"
    discrete: ClassVar[bool] = True
    shifted_by: ClassVar[tuple[str, ...]] = ()

    @property
    def num_outputs(self) -> int | None:
        return None if self.class_weight is None else len(self.class_weight)

    def initial(self) -> Tensor:
        return torch.zeros(0)

    def check(self, y: Tensor, who: str) -> Tensor:
        if y.dim() != 1 or (len(y) and (y.is_complex() or not _whole(y))):
            raise ValueError(f"{who}: y must be one row of integer labels, but is {y.dtype} of shape {tuple(y.shape)}")
        y = y.to(torch.int64)
        if len(y) and int(y.min()) < 0:
            raise ValueError(f"{who}: y holds the negative label {int(y.min())}")
        if self.num_outputs and len(y) and int(y.max()) >= self.num_outputs:
            raise ValueError(f"{who}: y holds the label {int(y.max())}, class_weight has {self.num_outputs} classes")
        return y

    def fitted(self, y: Tensor) -> "Categorical":
        return self

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        y = y.long()
        log_p = output.log_softmax(-1).gather(-1, y.expand(output.shape[:-1])[..., None])[..., 0]
        return log_p if self.class_weight is None else log_p * output.new_tensor(self.class_weight)[y]

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """diag(p) − ppᵀ."""
        p = output.softmax(-1)
        found = p.diag_embed() - p[..., :, None] * p[..., None, :]
        return (
            found
            if self.class_weight is None
            else found * output.new_tensor(self.class_weight)[y.long()][:, None, None]
        )

    def distribution(self, output: Tensor) -> Distribution:
        return TorchCategorical(logits=output, validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        return output.softmax(-1)


@dataclass(frozen=True)
class Bernoulli:
    """y is 0 or 1, or a row of such labels; the network gives the log odds of each."""

    labels: int = 1

    name: ClassVar[str] = "bernoulli"
    discrete: ClassVar[bool] = True
    shifted_by: ClassVar[tuple[str, ...]] = ("offset",)

    @property
    def num_outputs(self) -> int:
        return self.labels

    def initial(self) -> Tensor:
        return torch.zeros(0)

    def check(self, y: Tensor, who: str) -> Tensor:
        if y.dim() not in (1, 2):
            raise ValueError(f"{who}: y must hold a label or a row of labels for each example, not {tuple(y.shape)}")
        if bool(((y != 0) & (y != 1)).any()):
            raise ValueError(f"{who}: y must hold 0 and 1 only, as likelihood bernoulli says")
        return (y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y).float()

    def fitted(self, y: Tensor) -> "Bernoulli":
        return Bernoulli(y.shape[1] if y.dim() == 2 else 1)

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        y = y.reshape(len(y), -1)
        return (y * output - F.softplus(output)).sum(-1)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """diag(p(1 − p))."""
        p = output.sigmoid()
        return (p * (1 - p)).diag_embed()

    def distribution(self, output: Tensor) -> Distribution:
        return TorchBernoulli(logits=output[..., 0] if self.labels == 1 else output, validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        return (output[..., 0] if self.labels == 1 else output).sigmoid()


def _whole(y: Tensor) -> bool:
    return not y.is_floating_point() or bool((y == y.round()).all())
