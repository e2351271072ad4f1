"""Kernels of plain stacks: what autograd finds, to 1e-7 in double precision, for every activation and likelihood."""

from collections.abc import Callable

import pytest
import torch
from federation_fixtures import network
from torch import Tensor, nn
from torch.func import functional_call

from bcfl.client.kernels import SMOOTH, Kernels, kernels_of
from bcfl.likelihood import Likelihood, attach, mean_loss, of
from bcfl.likelihood.registry import CATEGORICAL
from bcfl.model.zoo import amazon_mlp, fashion_cnn, mlp

JOBS, EXAMPLES, INPUTS = 3, 5, 4


def stack(*activations: nn.Module, outputs: int = 3, bias: bool = True) -> nn.Module:
    layers: list[nn.Module] = []
    for activation in activations:
        layers += [nn.Linear(INPUTS, INPUTS, bias=bias), activation]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(INPUTS, outputs))


def found_kernels(module: nn.Module) -> Kernels:
    kernels = kernels_of(module)
    assert kernels is not None
    return kernels


def problem(module: nn.Module, tails: int = 2) -> tuple[Tensor, Tensor]:
    """Vectors of jobs, with numbers behind the parameters that are none, and inputs."""
    size = sum(p.numel() for p in module.parameters())
    vectors = torch.randn(JOBS, size + tails, dtype=torch.float64) * 0.5
    return vectors, torch.randn(JOBS, EXAMPLES, 2, INPUTS // 2, dtype=torch.float64)


def values(module: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    named, end, taken = dict(module.named_parameters()), 0, {}
    for name, parameter in named.items():
        taken[name] = vector[end : end + parameter.numel()].view(parameter.shape)
        end += parameter.numel()
    return taken


def assert_as_autograd(module: nn.Module, likelihood: Likelihood, y: Tensor) -> None:
    kernels = found_kernels(module)
    vectors, x = problem(module)
    size = vectors.shape[1] - 2
    gradient, squares = torch.full_like(vectors, torch.nan), torch.full_like(vectors, torch.nan)
    for part, piece in kernels.gradients(vectors, x, y):
        gradient[:, part] = piece
    share = torch.rand(JOBS, EXAMPLES, dtype=torch.float64)
    for part, piece in kernels.squares(vectors, x, y, share):
        squares[:, part] = piece
    for job in range(JOBS):
        expected = torch.zeros(size, dtype=torch.float64)
        leaf = vectors[job, :size].clone().requires_grad_()
        output = functional_call(module, values(module, leaf), (x[job],))
        assert torch.allclose(kernels.outputs(vectors, x)[job], output, rtol=1e-7, atol=1e-9)
        expected = torch.autograd.grad(mean_loss(likelihood, output, y[job]), leaf)[0]
        assert torch.allclose(gradient[job, :size], expected, rtol=1e-7, atol=1e-9)
        of_examples = torch.zeros(size, dtype=torch.float64)
        for i in range(EXAMPLES):
            one = functional_call(module, values(module, leaf), (x[job, i : i + 1],))
            (alone,) = torch.autograd.grad(mean_loss(likelihood, one, y[job, i : i + 1]), leaf)
            of_examples += share[job, i] * alone.square()
        assert torch.allclose(squares[job, :size], of_examples, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("activation", [nn.ReLU, *SMOOTH], ids=lambda kind: kind.__name__)
def test_every_activation(activation: Callable[[], nn.Module]) -> None:
    y = torch.randint(3, (JOBS, EXAMPLES))
    assert_as_autograd(stack(activation(), activation()).double(), CATEGORICAL, y)


@pytest.mark.parametrize("name", ["bernoulli", "normal", "poisson"])
def test_likelihoods_and_their_unknowns(name: str) -> None:
    likelihood = of(name)
    y = torch.randint(2, (JOBS, EXAMPLES)).double()
    assert_as_autograd(attach(lambda: stack(nn.Tanh(), outputs=1), likelihood)().double(), likelihood, y)


def test_no_bias_no_activation_and_stacks_within_stacks() -> None:
    y = torch.randint(3, (JOBS, EXAMPLES))
    assert_as_autograd(stack(nn.ReLU(), bias=False).double(), CATEGORICAL, y)
    assert_as_autograd(nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 3)).double(), CATEGORICAL, y)
    inner = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Identity(), nn.ReLU())
    assert_as_autograd(nn.Sequential(nn.Flatten(), inner, nn.Linear(INPUTS, 3)).double(), CATEGORICAL, y)


def test_what_is_frozen_has_no_gradient() -> None:
    module = stack(nn.ReLU()).double()
    module[1].weight.requires_grad_(False)
    vectors, x = problem(module)
    y = torch.randint(3, (JOBS, EXAMPLES))
    parts = {part.start: piece for part, piece in found_kernels(module).gradients(vectors, x, y)}
    assert sorted(parts) == [0, 16, 20, 32]
    assert not parts[0].any()
    assert parts[16].any()


def test_only_plain_stacks_have_kernels() -> None:
    shared = nn.Linear(INPUTS, INPUTS)
    tied = stack(nn.ReLU(), nn.ReLU())
    tied[3].weight = tied[1].weight
    watched = stack(nn.ReLU())
    watched[1].register_forward_hook(lambda *_: None)
    for module in (network(), fashion_cnn(), nn.Sequential(shared, nn.ReLU(), shared), tied, watched,
                   nn.Sequential(nn.Linear(4, 4), nn.Softmax(1))):  # fmt: skip
        assert kernels_of(module) is None
    assert kernels_of(mlp()) is not None
    assert kernels_of(amazon_mlp()) is not None
