"""A network with the unknowns of its likelihood beside it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from bcfl.likelihood.contract import Likelihood
from bcfl.likelihood.own import Own
from bcfl.likelihood.registry import CATEGORICAL


class Unknowns(nn.Module):
    """Learned numbers that stand behind whatever they are given, the same in every row."""

    def __init__(self, initial: Tensor):
        super().__init__()
        self.values = nn.Parameter(initial.clone())

    def forward(self, output: Tensor) -> Tensor:
        return torch.cat([output, self.values.expand(*output.shape[:-1], -1)], -1)


class Attached(nn.Module):
    """The network's output, then the unknowns of its likelihood, which are the first of its parameters."""

    def __init__(self, network: nn.Module, likelihood: Likelihood):
        super().__init__()
        self.likelihood = likelihood
        self.says = likelihood.spec  # so that networks with other likelihoods are told apart
        if likelihood.num_unknowns:
            self.unknowns: Unknowns | None = Unknowns(likelihood.initial())
        else:
            self.unknowns = None
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(x)
        return output if self.unknowns is None else self.unknowns(output)

    def distribution(self, x: Tensor) -> Distribution | None:
        """p(y | x) as torch has it, if it has."""
        return self.likelihood.distribution(self(x))

    def predict(self, x: Tensor) -> Tensor:
        """The mean of y given x."""
        return self.likelihood.mean(self(x))


def attach(factory: Callable[[], nn.Module], likelihood: Likelihood) -> Callable[[], nn.Module]:
    """A factory of the same networks with this likelihood; the factory itself, where it is plainly categorical."""
    if (
        likelihood == CATEGORICAL
        or likelihood == Likelihood(Own())
        or isinstance(factory, nn.Module)
        or not callable(factory)
    ):  # which will be refused
        return factory
    return partial(_made, factory, likelihood)  # no closure, so that a result can be pickled


def _made(factory: Callable[[], nn.Module], likelihood: Likelihood) -> nn.Module:
    network = factory()
    return Attached(network, likelihood) if isinstance(network, nn.Module) else network


def network_of(module: nn.Module) -> nn.Module:
    """The user's own network, without what was attached."""
    return module.network if isinstance(module, Attached) else module


def likelihood_of(module: nn.Module) -> Likelihood:
    """The likelihood that a module is trained with: categorical, where none is attached to it."""
    return module.likelihood if isinstance(module, Attached) else CATEGORICAL
