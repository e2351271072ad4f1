"""Targets that are classes, or yes-or-no labels."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution

LEAST_STEP = 1e-4  # between cut points, in log odds
LARGEST_STEP = 10.0  # its logarithm


@dataclass(frozen=True)
class Categorical:
    """y is a class from 0; the network gives a score for each: p = softmax."""

    class_weight: tuple[float, ...] | None = None  # log p of class c counts so often

    name: ClassVar[str] = "categorical"
    discrete: ClassVar[bool] = True
    kind: ClassVar[str] = "classes"
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

    def log_probs(self, output: Tensor) -> Tensor:
        """log p of every class."""  # (..., example, class)
        return output.log_softmax(-1)

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
    kind: ClassVar[str] = "labels"
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


@dataclass(frozen=True)
class Ordinal:
    """y is a class from 0 in an order; the network gives one number η, and P(y ≤ k) = σ(cut point k − η).

    The cut points are learned: the first one, and the logarithms of the steps to the next.
    """

    num_classes: int | None = None  # left open: as many as y has

    name: ClassVar[str] = "ordinal"
    discrete: ClassVar[bool] = True
    kind: ClassVar[str] = "classes"
    shifted_by: ClassVar[tuple[str, ...]] = ("offset",)

    def __post_init__(self) -> None:
        if self.num_classes is not None and self.num_classes < 2:
            raise ValueError(f"likelihood ordinal: num_classes must be at least 2, got {self.num_classes}")

    @property
    def num_outputs(self) -> int:
        return 1

    def initial(self) -> Tensor:
        count = self.num_classes or 2
        cuts = torch.logit(torch.arange(1, count) / count)
        return torch.cat([cuts[:1], cuts.diff().log()])

    def check(self, y: Tensor, who: str) -> Tensor:
        y = Categorical().check(y, who)
        if self.num_classes is not None and len(y) and int(y.max()) >= self.num_classes:
            raise ValueError(f"{who}: y holds the class {int(y.max())}, num_classes is {self.num_classes}")
        return y

    def fitted(self, y: Tensor) -> "Ordinal":
        return self if self.num_classes else Ordinal(max(int(y.max()) + 1, 2))

    def log_probs(self, output: Tensor) -> Tensor:
        """log p of every class: σ(b) − σ(a) = σ(b) σ(−a) (1 − e^(a − b)), which does not cancel."""
        # (..., example, class)
        steps = torch.cat([output[..., 1:2], output[..., 2:].clamp(max=LARGEST_STEP).exp() + LEAST_STEP], -1)
        ends = steps.cumsum(-1) - output[..., :1]
        above, below = F.pad(F.logsigmoid(ends), (0, 1)), F.pad(F.logsigmoid(-ends), (1, 0))
        between = torch.log(-torch.expm1(-steps[..., 1:]))
        return above + below + F.pad(between, (1, 1))

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        log_p = self.log_probs(output)
        return log_p.gather(-1, y.long().expand(log_p.shape[:-1])[..., None])[..., 0]

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """Σ over classes of (∂p/∂η)² / p."""
        p = self.log_probs(output).exp()
        upto = p.cumsum(-1)[..., :-1]  # P(y ≤ k)
        slope = F.pad(upto * (1 - upto), (1, 1)).diff(dim=-1)  # of −η
        return (slope.square() / p.clamp(min=1e-12)).sum(-1)[..., None, None]

    def distribution(self, output: Tensor) -> Distribution:
        return TorchCategorical(logits=self.log_probs(output), validate_args=False)

    def mean(self, output: Tensor) -> Tensor:
        return self.log_probs(output).exp()


def _whole(y: Tensor) -> bool:
    return not y.is_floating_point() or bool((y == y.round()).all())
