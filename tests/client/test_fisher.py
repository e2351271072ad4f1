"""The exact Fisher information: in closed form where there is one, without a word where torch has none of its own."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bcfl.client import fisher
from bcfl.client.examples import Examples, pool
from bcfl.client.fisher import exact_fisher, squares_by_layer
from bcfl.model.flat import FlatModel, build
from bcfl.model.zoo import amazon_mlp, cifar_cnn, fashion_cnn, mlp
from bcfl.randomness import generator


class Own(nn.Module):
    """Linear layers on a sequence, and one that is added to another's output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        x = x + self.second(x)
        output: Tensor = self.last(self.norm(x.mT).mean(2))
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.cell(x)[0][:, -1])
        return output


class Transposing(nn.Module):
    """A linear layer whose first axis is not the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x.transpose(0, 1)).sum(0))
        return output


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(self.first(x).tanh()).mean(1))
        return output


class Around(nn.Module):
    """A layer whose weight is used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).mean(1), self.last.weight, self.last.bias)


def examples_like(*shape: int, count: int = 6) -> Examples:
    x, images = pool(torch.randn(count, *shape, generator=generator(0, "x")))
    y = torch.randint(2, (count,), generator=generator(0, "y"))
    return Examples(x, y, torch.arange(count), images)


@pytest.mark.parametrize(
    ("factory", "shape"),
    [(mlp, (64,)), (amazon_mlp, (5000,)), (cifar_cnn, (3, 32, 32)), (fashion_cnn, (1, 28, 28)), (Own, (5, 3))],
)
def test_the_closed_form_is_autograds_sum_of_squares(factory: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    module = build(factory, 0).double().eval()
    x, y = examples_like(*shape).batch(torch.arange(6))

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, values, x[None]), y[None])

    values = {name: parameter.detach() for name, parameter in module.named_parameters()}
    gradients = vmap(grad(loss), (None, 0, 0))(values, x.double(), y)
    found = dict(squares_by_layer(module, module, x.double(), y))
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        expected = gradient.square().sum(0)
        assert (found[name].view_as(expected) - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize(
    ("factory", "shape"), [(mlp, (64,)), (cifar_cnn, (3, 32, 32)), (fashion_cnn, (1, 28, 28)), (Own, (5, 3))]
)
def test_in_single_precision_the_ways_differ_by_rounding(
    factory: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, examples = FlatModel(build(factory, 0)), examples_like(*shape)
    closed, stacked = (exact_fisher(model, examples, torch.arange(6), closed=closed) for closed in (True, False))
    assert fisher._WAYS[model] == {True: fisher._by_layer, False: fisher._stacked}
    assert (closed - stacked).norm() <= 4e-7 * stacked.norm()


@pytest.mark.parametrize("factory", [Recurrent, Transposing, Twice, Around])
@pytest.mark.parametrize("count", [5, 6])  # 5: as many as a sequence is long
def test_what_has_no_closed_form_is_done_otherwise(factory: Callable[[], nn.Module], count: int) -> None:
    model, examples = FlatModel(build(factory, 0)), examples_like(5, 3, count=count)
    expected = torch.zeros(model.num_parameters)
    fisher._one_by_one(model, examples, torch.arange(count), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = exact_fisher(model, examples, torch.arange(count), closed=True)
    assert fisher._WAYS[model][True] is not fisher._by_layer
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("closed", [True, False])
def test_an_lstm_warns_of_nothing(closed: bool, capfd: pytest.CaptureFixture[str]) -> None:
    exact_fisher(FlatModel(build(Recurrent, 0)), examples_like(5, 3), torch.arange(6), closed=closed)
    assert capfd.readouterr() == ("", "")


def test_without_a_closed_form_a_large_model_is_done_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fisher, "LARGE", 10)
    model = FlatModel(build(mlp, 0))
    exact_fisher(model, examples_like(64), torch.arange(6), closed=False)
    assert fisher._WAYS[model] == {False: fisher._one_by_one}


def test_a_diverged_model_decides_nothing() -> None:
    model = FlatModel(build(mlp, 0))
    with model.living_in(torch.full_like(model.vector, torch.nan)):
        assert exact_fisher(model, examples_like(64), torch.arange(6), closed=True).isnan().all()
    assert model not in fisher._WAYS
