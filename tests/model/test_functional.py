"""Calling a module with other numbers leaves the module as it was, whatever its layers share."""

import copy

import pytest
import torch
from torch import Tensor, nn

from bcfl.model.functional import call


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def _a_layer_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def _tied_weights() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


def _a_norm_twice() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    module = nn.Sequential(norm, nn.Linear(4, 4), norm)
    module(torch.randn(9, 4))  # so that there are statistics
    return module


class _Own(nn.Module):
    """A parameter of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("factory", [_plain, _a_layer_twice, _a_norm_twice, _tied_weights, _Own])
def test_it_is_the_module_with_these_numbers_and_the_module_stays(factory: type[nn.Module]) -> None:
    module = factory().eval()
    other = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in _tensors(other).values():
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
    before = {name: (tensor, tensor.clone()) for name, tensor in _tensors(module).items()}
    x = torch.randn(5, 4)
    found = call(module, _tensors(other), x)
    assert torch.equal(found, other(x))
    assert not torch.allclose(found, module(x))
    for name, tensor in _tensors(module).items():
        assert tensor is before[name][0], name
        assert torch.equal(tensor, before[name][1]), name


def test_buffers_are_taken_too_and_what_is_not_given_is_the_modules_own() -> None:
    module = nn.BatchNorm1d(2).eval()
    x = torch.ones(1, 2)
    assert torch.allclose(call(module, {"running_mean": torch.ones(2)}, x), torch.zeros(1, 2))
    assert torch.allclose(module(x), torch.ones(1, 2), atol=1e-4)
