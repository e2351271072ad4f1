"""The two models that every contestant is given: a linear one, and a small network that holds the linear one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

HIDDEN = 16
MODELS = ("linear", "network")


class WithInputs(nn.Module):
    """A hidden layer whose outputs go to the last layer together with the inputs themselves."""

    def __init__(self, num_inputs: int, num_outputs: int):
        super().__init__()
        self.hidden = nn.Linear(num_inputs, HIDDEN)
        self.last = nn.Linear(HIDDEN + num_inputs, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.cat([self.hidden(x).tanh(), x], -1))
        return found


def factory(model: str, num_inputs: int, num_outputs: int) -> Callable[[], nn.Module]:
    """What makes a new model of that name."""
    if model == "linear":
        return lambda: nn.Linear(num_inputs, num_outputs)
    return lambda: WithInputs(num_inputs, num_outputs)
