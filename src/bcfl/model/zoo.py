"""The networks known by name: one for scikit-learn's digits, the paper's four, and two for tables of any width."""

import difflib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from bcfl.model.flat import ModelFactory


def mlp(num_inputs: int = 64, num_hidden: int = 32, num_classes: int = 10) -> nn.Module:
    """One hidden layer: enough for scikit-learn's 8×8 digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_classes))


def fashion_cnn() -> nn.Module:
    """The paper's net for Fashion-MNIST (its second BatchNorm has 32 channels, a slip in the paper's table)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(7 * 7 * 32, 10),
    )  # fmt: skip


def cifar_cnn() -> nn.Module:
    """The paper's net for CIFAR-10 (its second convolution has 16 channels, hence 400)."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def digits_five_cnn() -> nn.Module:
    """The paper's net for Digits-Five, 26 million parameters (pooling 3, stride 2, padding 1, hence 6272 = 128·7·7)."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(64, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(64, 128, 5, padding=2), nn.BatchNorm2d(128), nn.ReLU(),
        nn.Flatten(), nn.Linear(6272, 3072), nn.BatchNorm1d(3072), nn.ReLU(), nn.Dropout(),
        nn.Linear(3072, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 10),
    )  # fmt: skip


def amazon_mlp() -> nn.Module:
    """The paper's net for AmazonReview (with a ReLU before its classifier)."""
    return nn.Sequential(
        nn.Linear(5000, 1000), nn.ReLU(), nn.Linear(1000, 500), nn.ReLU(),
        nn.Linear(500, 100), nn.ReLU(), nn.Linear(100, 2),
    )  # fmt: skip


class TableNet(nn.Module):
    """One hidden layer, and a last layer that sees its features and the inputs themselves.

    So whatever is done with the last layer alone is no worse off than with a linear model.
    """

    def __init__(self, num_inputs: int, num_outputs: int, num_hidden: int):
        super().__init__()
        self.hidden = nn.Linear(num_inputs, num_hidden)
        self.last = nn.Linear(num_inputs + num_hidden, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.cat([x, self.hidden(x).relu()], -1))
        return outputs


def table(num_inputs: int, num_outputs: int, num_hidden: int = 16) -> nn.Module:
    """For a table: one hidden layer, its features and the inputs beside them go into the last."""
    return TableNet(num_inputs, num_outputs, num_hidden)


def linear(num_inputs: int, num_outputs: int) -> nn.Module:
    """For a table: a linear model, such as logistic or linear regression."""
    return nn.Linear(num_inputs, num_outputs)


SIZED: dict[str, Callable[[int, int], nn.Module]] = {"table": table, "linear": linear}  # as large as the data want it
MODELS: dict[str, ModelFactory] = {
    "mlp": mlp,
    "fashion_cnn": fashion_cnn,
    "cifar_cnn": cifar_cnn,
    "digits_five_cnn": digits_five_cnn,
    "amazon_mlp": amazon_mlp,
}


def look_up(name: str, sizes: tuple[int, int] | None = None) -> ModelFactory:
    """The model of that name; `sizes` are the inputs and outputs of one that is as large as the data want it."""
    if name in SIZED:
        if sizes is None:
            raise ValueError(f"model {name!r} is for tables, whose examples are rows of numbers")
        return partial(SIZED[name], *sizes)
    if name not in MODELS:
        known = [*MODELS, *SIZED]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown model {name!r}; {hint}known: {', '.join(known)}")
    return MODELS[name]
