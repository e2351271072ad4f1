"""The diagonal empirical Fisher information: the mean over examples of (∂ log p(y|x,θ) / ∂θ)², in evaluation mode.

In training mode BatchNorm would tie the examples together. There are three ways to the same numbers, but for rounding:
by layer, in closed form; by `vmap`, with the gradients of some examples held at a time; and one example by one.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from bcfl.client.examples import Examples
from bcfl.likelihood import Likelihood, Unknowns, likelihood_of, mean_loss
from bcfl.model.flat import FlatModel
from bcfl.model.functional import call
from bcfl.model.layout import is_watched

CHUNK = 32  # examples whose gradients, or unfolded images, are held at a time
LARGE = 1 << 20  # parameters: of larger models, gradients one by one are faster, and need not be held
TRIED = 3  # examples on which a way is tried before it is trusted
Forward = Callable[[Tensor], Tensor]
Way = Callable[[FlatModel, Examples, Tensor, Tensor], None]  # adds the mean over these rows to a flat vector

_TRYING = threading.Lock()  # warnings are filtered for the whole process
_WAYS: "WeakKeyDictionary[FlatModel, dict[bool, Way]]" = WeakKeyDictionary()  # what each model can be done by


def exact_fisher(model: FlatModel, examples: Examples, rows: Tensor, *, closed: bool) -> Tensor:
    """The mean over these examples of ∂log p(y|x,θ)² at the model's parameters; in closed form if it can be."""
    model.module.eval()
    fisher = torch.zeros(model.num_parameters)  # (parameter,)
    way = _WAYS.get(model, {}).get(closed) or _find_way(model, examples, rows[:TRIED], closed)
    way(model, examples, rows, fisher)
    return fisher


def _find_way(model: FlatModel, examples: Examples, rows: Tensor, closed: bool) -> Way:
    """The first way that this model can be done by, as told by some examples: a user's module may do anything."""
    ways: list[Way] = [_by_layer] if closed and is_known(model.module) else []
    ways += [_stacked] if model.num_parameters <= LARGE else []
    expected = torch.zeros(model.num_parameters)
    _one_by_one(model, examples, rows, expected)
    if not expected.isfinite().all():  # nothing can be told from it
        return _one_by_one
    way = next((way for way in ways if _agrees(way, model, examples, rows, expected)), _one_by_one)
    _WAYS.setdefault(model, {})[closed] = way
    return way


def _agrees(way: Way, model: FlatModel, examples: Examples, rows: Tensor, expected: Tensor) -> bool:
    found = torch.zeros_like(expected)
    try:
        with _TRYING, torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as said:
            way(model, examples, rows, found)
    except Exception:
        return False
    # vmap warns where it knows no better than to take one example after the other, as for an LSTM.
    in_turn = any("performance drop" in str(warning.message) for warning in said)
    return not in_turn and agree(found, expected)


def agree(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 0.001 * expected.norm())


def is_known(module: nn.Module) -> bool:
    """Whether all that is trained is in layers whose gradients have a closed form."""
    inside = {id(p) for layer in module.modules() if _has_closed_form(layer) for p in layer.parameters()}
    return all(id(parameter) in inside for parameter in module.parameters() if parameter.requires_grad)


def _has_closed_form(layer: nn.Module) -> bool:
    if is_watched(layer):
        return False
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) in (nn.Linear, Unknowns) or (isinstance(layer, _BatchNorm) and layer.track_running_stats)


def _by_layer(model: FlatModel, examples: Examples, rows: Tensor, fisher: Tensor) -> None:
    views = model.parameter_views(fisher)
    for part in rows.split(CHUNK):
        for name, squares in squares_by_layer(model.module, model.module, *examples.batch(part)):
            views[name].add_(squares.view_as(views[name]), alpha=1 / len(rows))


def squares_by_layer(module: nn.Module, forward: Forward, x: Tensor, y: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The sums over examples of squared gradients, parameter by parameter, from one pass for all of the examples.

    What a layer's weight is multiplied with, a, and the gradient δ by the layer's output are all that is needed: an
    example's gradient is δaᵀ, summed over the places at which it meets the weight (those of a convolution). With one
    place, the sum of its squares over examples is (δ²)ᵀ(a²).
    """
    starts: list[Tensor] = []
    told: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def watch(name: str, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        if not inputs[0].requires_grad:  # the first layer: gradients need not go further back
            starts.append(output.detach().requires_grad_())
            output = starts[-1].clone()
        factor = _factor(layer, inputs[0].detach())
        output.register_hook(lambda delta: told.append((name, layer, factor, _by_place(delta, layer))))
        return output

    layers = {name: layer for name, layer in module.named_modules() if _has_closed_form(layer)}
    hooks = [layer.register_forward_hook(partial(watch, name)) for name, layer in layers.items()]
    try:
        torch.autograd.grad(_total_loss(likelihood_of(module), forward(x), y), starts)
    finally:
        for hook in hooks:
            hook.remove()
    if len(told) != len({name for name, *_ in told}):
        raise ValueError("a layer is called twice")
    for name, layer, factor, delta in told:
        if len(factor) != len(x) or len(delta) != len(x):
            raise ValueError(f"layer {name} does not keep the examples apart")
        for key, parameter in layer._parameters.items():
            if parameter is not None and parameter.requires_grad:
                told_of = delta[..., -parameter.numel() :] if isinstance(layer, Unknowns) else delta
                yield f"{name}.{key}".lstrip("."), _squares(layer if key == "weight" else None, factor, told_of)


def _total_loss(likelihood: Likelihood, output: Tensor, y: Tensor) -> Tensor:
    if likelihood.is_plain:
        return F.cross_entropy(output, y, reduction="sum")
    return -likelihood.log_prob(output, y).sum()


def _squares(layer: nn.Module | None, factor: Tensor, delta: Tensor) -> Tensor:
    """Sums over examples of squared gradients of a layer's weight, or (None) of a bias."""
    if layer is None or isinstance(layer, Unknowns):
        return delta.sum(1).square().sum(0)
    if isinstance(layer, _BatchNorm):
        return (delta * factor).sum(1).square().sum(0)
    if delta.shape[1] == 1:
        return delta[:, 0].square().T @ factor[:, 0].square()
    return (delta.mT @ factor).square().sum(0)


def _factor(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer's weight is multiplied with."""  # (example, place, input)
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        return F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
    if isinstance(layer, _BatchNorm):
        return _by_place(F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps), layer)
    return _by_place(x, layer)


def _by_place(tensor: Tensor, layer: nn.Module) -> Tensor:
    """(example, place, channel) of the input or the output of a layer."""
    if isinstance(layer, nn.Linear | Unknowns):
        return tensor.reshape(len(tensor), -1, tensor.shape[-1])
    return tensor.reshape(len(tensor), tensor.shape[1], -1).mT


def _stacked(model: FlatModel, examples: Examples, rows: Tensor, fisher: Tensor) -> None:
    named = dict(model.module.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    rest = {name: p.detach() for name, p in named.items() if not p.requires_grad} | dict(model.module.named_buffers())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return mean_loss(model.likelihood, call(model.module, values | rest, x[None]), y[None])

    per_example = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    views = model.parameter_views(fisher)
    for part in rows.split(CHUNK):
        for name, gradient in per_example(trained, *examples.batch(part)).items():
            views[name].add_(gradient.square().sum(0), alpha=1 / len(rows))


def _one_by_one(model: FlatModel, examples: Examples, rows: Tensor, fisher: Tensor) -> None:
    for row in rows.split(1):
        x, y = examples.batch(row)
        for part, gradient in model.gradients(mean_loss(model.likelihood, model.module(x), y)):
            fisher[part].addcmul_(gradient, gradient, value=1 / len(rows))
