"""What a family of distributions must tell, and what goes for all of them."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution

from bcfl.likelihood.classes import Categorical
from bcfl.likelihood.own import Own

EXTRAS = ("weight", "offset", "exposure")  # what further columns of y may be
OPEN = ("num_classes", "center", "spread", "unit", "edges")  # options that may be left to y
PER = ("all", "cluster")  # whose the unknowns are


class Family(Protocol):
    """The mathematics of one kind of target; a frozen dataclass whose fields are its options.

    `output` is (..., example, C + U): the network's own C numbers, then the U unknowns, the same for every example.
    """

    name: ClassVar[str]
    discrete: ClassVar[bool]  # whether log p is never above 0
    kind: ClassVar[str]  # what is measured: see `measures`
    shifted_by: ClassVar[tuple[str, ...]]  # of offset and exposure, what it can take: both add to the first output

    @property
    def num_outputs(self) -> int | None:
        """How many numbers the network must give for an example; None where the data say it."""
        ...

    def initial(self) -> Tensor:
        """The unknowns at the beginning."""  # (unknown,)
        ...

    def check(self, y: Tensor, who: str) -> Tensor:
        """The targets in the type in which they are kept; what they cannot be is refused, with `who`."""
        ...

    def fitted(self, y: Tensor) -> "Family":
        """The same with what was left open taken from all targets, such as a number of classes or a scale."""
        ...

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        """log p(y | output) of each example."""  # (..., example)
        ...

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """The Fisher information of each example's network outputs: expected where it is known, else as observed."""
        ...  # (..., example, C, C)

    def distribution(self, output: Tensor) -> Distribution | None:
        """p(y | output) as torch has it, if it has."""  # batch shape (..., example)
        ...

    def mean(self, output: Tensor) -> Tensor:
        """The point prediction: the mean, or the probabilities of classes."""  # (..., example, ...)
        ...


@dataclass(frozen=True)
class Likelihood:
    """A family, the extra columns that stand last in y, and whose its unknowns are."""

    family: Family
    extras: tuple[str, ...] = ()
    per: str = "all"

    def __post_init__(self) -> None:
        for extra in self.extras:
            if extra not in EXTRAS:
                raise ValueError(f"likelihood {self.name}: extras must be of {', '.join(EXTRAS)}, got {extra!r}")
            if extra != "weight" and extra not in self.family.shifted_by:
                raise ValueError(f"likelihood {self.name}: takes no {extra}")
        if self.per not in PER:
            raise ValueError(f"likelihood {self.name}: per must be one of {', '.join(PER)}, got {self.per!r}")

    @property
    def name(self) -> str:
        return self.family.name

    @property
    def is_plain(self) -> bool:
        """Whether it is log softmax of a class and nothing else."""
        return isinstance(self.family, Categorical) and self.family.class_weight is None and not self.extras

    @property
    def left_open(self) -> tuple[str, ...]:
        """The options that nobody has told, and that all clients' y are to say."""
        return tuple(name for name in OPEN if getattr(self.family, name, 0) is None)

    @property
    def discrete(self) -> bool:
        """Whether no log-likelihood is above 0."""
        return self.family.discrete

    @property
    def num_unknowns(self) -> int:
        return len(self.family.initial())

    def initial(self) -> Tensor:
        return self.family.initial()

    @property
    def spec(self) -> str:
        """The likelihood as a setting has it: its name, and in brackets what is not by default."""
        given = [
            f"{field.name}={_shown(getattr(of, field.name))}"
            for of in (self.family, self)
            for field in fields(of)  # type: ignore[arg-type]
            if field.name != "family" and getattr(of, field.name) != field.default
        ]
        return self.name + (f"({', '.join(given)})" if given else "")

    def fitted(self, y: Tensor) -> "Likelihood":
        """The same with what was left open taken from all clients' y."""
        return replace(self, family=self.family.fitted(self.parted(y)[0]))

    def check(self, y: Tensor, who: str) -> Tensor:
        """y in the type in which it is kept; what it cannot be is refused in one line that names `who`."""
        if not self.extras:
            return self.family.check(y, who)
        count = len(self.extras)
        if y.dim() != 2 or y.shape[1] <= count:
            raise ValueError(f"{who}: y must have a column for the target and then for {', '.join(self.extras)}, "
                             f"but its shape is {tuple(y.shape)}")  # fmt: skip
        target, extra = self.parted(y)
        for name, column in extra.items():
            least = {"weight": column < 0, "exposure": column <= 0}.get(name, torch.zeros(len(column)).bool())
            if not column.isfinite().all() or bool(least.any()):
                raise ValueError(f"{who}: {name} must be finite" + {"weight": " and ≥ 0", "exposure": " and > 0"}.get(
                    name, ""))  # fmt: skip
        kept = self.family.check(target, who).float()
        return torch.cat([kept.reshape(len(y), -1), y[:, -count:].float()], 1)

    def parted(self, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The targets, and the extra columns by their names."""
        if not self.extras:
            return y, {}
        count = len(self.extras)
        target, rest = y[:, :-count], y[:, -count:]
        return (target[:, 0] if target.shape[1] == 1 else target), dict(zip(self.extras, rest.unbind(1), strict=True))

    def shifted(self, output: Tensor, extra: dict[str, Tensor]) -> Tensor:
        """The output with offset, and the logarithm of exposure, added to its first number."""
        for name, column in extra.items():
            if name != "weight":
                by = column.log() if name == "exposure" else column
                output = torch.cat([output[..., :1] + by[:, None], output[..., 1:]], -1)
        return output

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        """weight · log p(y | output) of each example."""  # (..., example)
        target, extra = self.parted(y)
        log_p = self.family.log_prob(self.shifted(output, extra), target)
        return log_p * extra["weight"] if "weight" in extra else log_p

    def log_classes(self, output: Tensor) -> Tensor:
        """log p of every class, where y is one: of yes or no, both."""  # (..., example, class)
        if self.family.kind == "classes":
            return self.family.log_probs(output)  # type: ignore[attr-defined, no-any-return]
        if self.family.kind == "labels" and self.family.num_outputs == 1:
            return torch.cat([F.logsigmoid(-output), F.logsigmoid(output)], -1)
        raise ValueError(f"likelihood {self.name} has no probabilities of classes: use predict")

    def of_models(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The same of the outputs of several models, also where a function of the user's takes only one."""
        if isinstance(self.family, Own):
            return torch.stack([self.log_prob(output, y) for output in outputs])
        return self.log_prob(outputs, y)  # (model, example)

    def information(self, output: Tensor, y: Tensor) -> Tensor:
        """weight · the Fisher information of each example's network outputs (generalised Gauss-Newton)."""
        target, extra = self.parted(y)
        found = self.family.information(self.shifted(output, extra), target)  # (..., example, C, C)
        return found * extra["weight"][:, None, None] if "weight" in extra else found

    def distribution(self, output: Tensor, y: Tensor | None = None) -> Distribution | None:
        """p(y | output) as torch has it, if it has; offsets and exposures are those in y."""
        return self.family.distribution(output if y is None else self.shifted(output, self.parted(y)[1]))

    def mean(self, output: Tensor, y: Tensor | None = None) -> Tensor:
        """The point prediction."""
        return self.family.mean(output if y is None else self.shifted(output, self.parted(y)[1]))


def mean_loss(likelihood: Likelihood, output: Tensor, y: Tensor) -> Tensor:
    """−log p(y | output), averaged over the examples: what training minimises."""
    if likelihood.is_plain:  # as published runs had it, to the bit
        return F.cross_entropy(output, y)
    return -likelihood.log_prob(output, y).mean()


def _shown(value: Any) -> str:
    return "+".join(map(_shown, value)) if isinstance(value, tuple) else str(value)
