"""What a network is made of tells networks apart, and is the same wherever one is built."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcfl.client.client import layout_of
from bcfl.client.trainer import Training
from bcfl.model.architecture import architecture
from bcfl.model.flat import FlatModel
from bcfl.model.zoo import MODELS


class Net(nn.Module):
    def __init__(self, slope: float = 0.1, activation: Callable[[Tensor], Tensor] = F.relu):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.slope, self.activation, self.folder = slope, activation, "/home/somebody"

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.activation(self.first(x)) * self.slope)
        return output


class Squashed(Net):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.sigmoid(self.first(x)))
        return output


def test_networks_of_equal_size_are_told_apart() -> None:
    different = [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4)),
        Net(),
        Net(slope=0.2),
        Net(activation=torch.tanh),
        Squashed(),
    ]
    for one, other in combinations(map(architecture, different), 2):
        assert one != other


def test_it_is_the_same_wherever_a_network_is_built() -> None:
    there = ": Net(activation=relu, slope=0.1, forward: activation first last slope)"
    linear = "Linear(in_features=4, out_features=4, bias=True)"
    assert architecture(Net()) == (there, f"first: {linear}", f"last: {linear}")


@pytest.mark.parametrize("factory", MODELS.values())
def test_it_is_the_same_whenever_a_factory_is_called(factory: Callable[[], nn.Module]) -> None:
    if factory is not MODELS["digits_five_cnn"]:  # 26 million numbers to draw
        assert architecture(factory()) == architecture(factory())


def test_a_run_that_has_not_noted_its_layers_is_accepted() -> None:
    layout = layout_of(FlatModel(Net()), Training())
    layout.refuse_other(layout.length, layout.shapes, (), "in an old run")
    with pytest.raises(ValueError, match=r"the model's layer 1 is : Net\(.*, but in a run : Squashed"):
        layout.refuse_other(layout.length, layout.shapes, architecture(Squashed()), "in a run")
