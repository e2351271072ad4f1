"""Clients in two groups whose targets follow opposite rules, a small problem for each likelihood, told in full."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

NUM_FEATURES, PER_GROUP, NUM_EXAMPLES = 4, 3, 40


@dataclass(frozen=True)
class Planted:
    """A likelihood, the network's outputs, and how y is drawn from η, which the groups have with opposite signs."""

    likelihood: str
    num_outputs: int
    draw: Callable[[Tensor, torch.Generator], Tensor]  # (example,) -> y
    training: dict[str, Any] = field(default_factory=dict)


def _exponential(eta: Tensor, g: torch.Generator) -> Tensor:
    """Times until an event and until nobody looks any more, whichever comes first."""
    time = eta.exp() * -torch.rand(len(eta), generator=g).clamp(min=1e-6).log()
    last = 0.1 + 4 * torch.rand(len(eta), generator=g)
    return torch.stack([torch.minimum(time, last).clamp(min=1e-3), (time <= last).float()], 1)


def _counts(eta: Tensor, g: torch.Generator) -> Tensor:
    return torch.poisson((0.5 * eta + 0.5).exp(), generator=g)


def _counts_of_ones(eta: Tensor, g: torch.Generator) -> Tensor:
    return torch.stack([_counts(eta, g), torch.ones(len(eta))], 1)


def _noisy(eta: Tensor, g: torch.Generator) -> Tensor:
    return 3 + 2 * (eta + 0.3 * torch.randn(len(eta), generator=g))


def _class(eta: Tensor, g: torch.Generator) -> Tensor:
    return (_noisy(eta, g)[:, None] > torch.tensor([1.0, 5.0])).sum(1)


UNITS, GENTLE = "center=3.0, spread=3.0", {"learning_rate": 0.02}
PLANTED = {
    "categorical": Planted("categorical", 3, _class),
    "weighted": Planted("categorical(class_weight=1.0+2.0+1.0)", 3, _class),
    "bernoulli": Planted("bernoulli(labels=2)", 2, lambda eta, g: torch.stack([_noisy(eta, g) > 3, eta < 0], 1).long()),
    "ordinal": Planted("ordinal(num_classes=3)", 1, _class),
    "normal": Planted(f"normal({UNITS})", 1, _noisy),
    "per cluster": Planted(f"normal({UNITS}, per=cluster)", 1, _noisy),
    "both from the network": Planted(f"normal(scale=network, {UNITS})", 2, _noisy, GENTLE),
    "student_t": Planted(f"student_t({UNITS})", 1, _noisy),
    "quantile": Planted(f"quantile({UNITS})", 5, _noisy),
    "poisson": Planted("poisson", 1, _counts, GENTLE),
    "exposure": Planted("poisson(extras=exposure)", 1, _counts_of_ones, GENTLE),
    "negative_binomial": Planted("negative_binomial", 1, _counts, GENTLE),
    "weibull": Planted("weibull(unit=1.0)", 1, _exponential, GENTLE),
    "lognormal": Planted("lognormal(unit=1.0)", 1, _exponential, GENTLE),
    "hazard": Planted("hazard(edges=0.5+1.0+2.0+4.2)", 4, _exponential),
}


def linear(name: str) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(NUM_FEATURES, PLANTED[name].num_outputs)


def clients(name: str) -> list[dict[str, Any]]:
    """Each with its group, and test data."""
    g = torch.Generator().manual_seed(0)
    rule, found = torch.tensor([1.0, -0.8, 0.5, 0.3]), []
    for client in range(2 * PER_GROUP):
        group = client // PER_GROUP
        x = torch.randn(2 * NUM_EXAMPLES, NUM_FEATURES, generator=g)
        y = PLANTED[name].draw((1 - 2 * group) * (x @ rule), g)
        one = {"x": x[:NUM_EXAMPLES], "y": y[:NUM_EXAMPLES], "x_test": x[NUM_EXAMPLES:], "y_test": y[NUM_EXAMPLES:]}
        found.append({**one, "group": group})
    return found


def counts_clients() -> list[dict[str, Any]]:
    return clients("negative_binomial")


def normal_clients() -> list[dict[str, Any]]:
    return clients("normal")


def times_clients() -> list[dict[str, Any]]:
    return clients("weibull")


def one_output() -> nn.Module:
    return nn.Linear(NUM_FEATURES, 1)
