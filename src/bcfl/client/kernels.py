"""Plain stacks of linear layers and activations, for many jobs at once: a matrix product forward, two backward.

What autograd and `vmap` find by tracing is written down here: the output of layer l of all jobs is one batched product,
its gradient another, and of squared gradients there is a closed form. A third of the time is saved where networks are
small. Vectors are read and written where they lie: nothing is taken apart or put together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from bcfl.client.examples import Examples
from bcfl.likelihood import CATEGORICAL, Attached, Likelihood, likelihood_of, mean_loss
from bcfl.model.flat import FlatModel
from bcfl.model.layout import is_watched
from bcfl.model.vmapped import near

Pull = Callable[[Tensor], Tensor]  # the gradient by an activation's input, from that by its output
Delta = Callable[[Tensor, Tensor], Tensor]  # outputs and labels -> the gradient of each example's loss by its outputs
TRIED = 4  # examples
SMOOTH = (
    nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Softplus, nn.Softsign, nn.Mish,
    nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A linear layer, where its numbers are in a vector, and the activation that follows."""

    inputs: int
    outputs: int
    weight: slice
    bias: slice | None
    trained: tuple[bool, bool]  # weight and bias; the gradient of others is 0
    activations: tuple[nn.Module, ...]

    def weights(self, vectors: Tensor) -> Tensor:
        """Those of each job, seen in its vector."""  # (job, vector) -> (job, output, input)
        return vectors[:, self.weight].view(-1, self.outputs, self.inputs)

    def __call__(self, vectors: Tensor, x: Tensor) -> Tensor:
        """The outputs before activation."""  # (job, example, input) -> (job, example, output)
        weight = self.weights(vectors).mT
        return torch.bmm(x, weight) if self.bias is None else torch.baddbmm(vectors[:, None, self.bias], x, weight)


@dataclass(frozen=True)
class Kernels:
    """The functions of such a stack; the unknowns of its likelihood, if there are any, are its last outputs."""

    layers: tuple[Layer, ...]
    unknowns: slice
    delta_of: Delta

    @property
    def num_activations(self) -> int:
        """How many numbers an example's step keeps for its gradient."""
        return self.layers[0].inputs + sum((2 + len(layer.activations)) * layer.outputs for layer in self.layers)

    def outputs(self, vectors: Tensor, x: Tensor) -> Tensor:
        """The outputs of each job's network on its own inputs."""  # (job, example, ...) -> (job, example, output)
        x = x.flatten(2)
        with torch.no_grad():
            for layer in self.layers:
                x = layer(vectors, x)
                for activation in layer.activations:
                    x = activation(x)
        return self._with_unknowns(vectors, x)

    def gradients(self, vectors: Tensor, x: Tensor, y: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Each job's gradient of its mean loss, part by part with its place, the last layer's first.

        The vectors may change at once where a part has been given: nothing reads them there any more.
        """  # (job, number of the part)
        inputs, pulls, output = self._forward(vectors, x.flatten(2))
        delta = self.delta_of(output, y).div_(x.shape[1])
        yield from self._backward(vectors, inputs, pulls, delta, _gradient)

    def squares(self, vectors: Tensor, x: Tensor, y: Tensor, share: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The sums over each job's examples of share · squared gradient, part by part: Σ (δ²)ᵀ(a²), see `fisher`."""
        inputs, pulls, output = self._forward(vectors, x.flatten(2))
        delta = self.delta_of(output, y).mul_(share.sqrt()[..., None])  # (job, example, output)
        yield from self._backward(vectors, inputs, pulls, delta, _square)

    def _forward(self, vectors: Tensor, x: Tensor) -> tuple[list[Tensor], list[list[Pull]], Tensor]:
        inputs, pulls = [], list[list[Pull]]()
        for layer in self.layers:
            inputs.append(x)
            x, back = layer(vectors, x), []
            for activation in layer.activations:
                x, pull = _activated(activation, x)
                back.append(pull)
            pulls.append(back)
        return inputs, pulls, self._with_unknowns(vectors, x)

    def _with_unknowns(self, vectors: Tensor, output: Tensor) -> Tensor:
        if self.unknowns.start == self.unknowns.stop:
            return output
        return torch.cat([output, vectors[:, None, self.unknowns].expand(-1, output.shape[1], -1)], 2)

    def _backward(
        self,
        vectors: Tensor,
        inputs: list[Tensor],
        pulls: list[list[Pull]],
        delta: Tensor,
        of: Callable[[Tensor, Tensor | None], Tensor],
    ) -> Iterator[tuple[slice, Tensor]]:
        if self.unknowns.start < self.unknowns.stop:
            delta, of_unknowns = delta.tensor_split([self.layers[-1].outputs], 2)
            yield self.unknowns, of(of_unknowns, None)
        for place in reversed(range(len(self.layers))):
            layer, x = self.layers[place], inputs[place]
            for pull in reversed(pulls[place]):
                delta = pull(delta)
            before, (weight, bias) = delta, layer.trained
            if place:  # before the caller changes this layer's weights
                delta = torch.bmm(delta, layer.weights(vectors))
            yield layer.weight, of(before, x) if weight else torch.zeros_like(vectors[:, layer.weight])
            if layer.bias is not None:
                yield layer.bias, of(before, None) if bias else torch.zeros_like(vectors[:, layer.bias])


def _gradient(delta: Tensor, x: Tensor | None) -> Tensor:
    return delta.sum(1) if x is None else torch.bmm(delta.mT, x).flatten(1)


def _square(delta: Tensor, x: Tensor | None) -> Tensor:
    return _gradient(delta.square(), None if x is None else x.square())


def _activated(activation: nn.Module, x: Tensor) -> tuple[Tensor, Pull]:
    """What the activation makes of x, and how gradients come back through it."""
    if type(activation) is nn.ReLU:
        y = x.relu()
        return y, lambda delta: torch.ops.aten.threshold_backward(delta, y, 0)
    with torch.enable_grad():
        before = x.detach().requires_grad_()
        after = activation(before)
    return after.detach(), lambda delta: torch.autograd.grad(after, before, delta)[0]


def tried_kernels(model: FlatModel, examples: Examples) -> Kernels | None:
    """The kernels of the model's module, if there are any that do on some examples what the module itself does."""
    kernels = kernels_of(model.module)
    if kernels is None:
        return None
    x, y = examples.batch(torch.arange(min(TRIED, len(examples))))
    vector, expected = model.vector.clone(), torch.zeros(model.num_parameters)
    found = torch.zeros_like(expected)
    output = model.module.train()(x)
    for part, piece in model.gradients(mean_loss(likelihood_of(model.module), output, y)):
        expected[part] = piece
    for part, piece in kernels.gradients(vector[None], x[None], y[None]):
        found[part] = piece[0]
    same = near(kernels.outputs(vector[None], x[None])[0], output.detach()) and near(found, expected)
    return kernels if same else None  # a hook on a parameter, say


def kernels_of(module: nn.Module) -> Kernels | None:
    """The kernels of a module that is such a stack, with a likelihood or without; None of any other."""
    likelihood, unknowns, network = CATEGORICAL, 0, module
    if type(module) is Attached:
        likelihood, network = module.likelihood, module.network
        unknowns = likelihood.num_unknowns
    steps = _steps(network)
    if not steps or any(is_watched(step) for step in module.modules()):
        return None
    if type(steps[0]) is nn.Flatten and (steps[0].start_dim, steps[0].end_dim) == (1, -1):
        steps = steps[1:]
    place_of, end = {}, 0  # as they lie in the flat vector
    for parameter in module.parameters():
        place_of[id(parameter)] = slice(end, end + parameter.numel())
        end += parameter.numel()
    layers: list[Layer] = []
    for step in steps:
        if type(step) is nn.Linear:
            layers.append(_layer(step, place_of))
        elif layers and _is_activation(step):
            layers[-1] = replace(layers[-1], activations=(*layers[-1].activations, step))
        elif type(step) is not nn.Identity:
            return None
    tensors = sum(1 + (layer.bias is not None) for layer in layers) + (unknowns > 0)
    if not layers or tensors != len(place_of):  # the latter where layers share their numbers, or one stands there twice
        return None
    return Kernels(tuple(layers), slice(0, unknowns), delta_of(likelihood))


def _is_activation(step: nn.Module) -> bool:
    return type(step) is nn.ReLU or (type(step) in SMOOTH and not getattr(step, "inplace", False))


def _steps(module: nn.Module) -> list[nn.Module]:
    """The layers in their order, those of stacks within stacks too; of what is no stack, itself."""
    if type(module) is not nn.Sequential:
        return [module]
    return [step for part in module._modules.values() if part is not None for step in _steps(part)]


def _layer(linear: nn.Linear, place_of: Mapping[int, slice]) -> Layer:
    weight, bias = linear.weight, linear.bias
    has_bias = bias is not None
    return Layer(
        linear.in_features, linear.out_features, place_of[id(weight)], place_of[id(bias)] if has_bias else None,
        (weight.requires_grad, has_bias and bias.requires_grad), (),
    )  # fmt: skip


def delta_of(likelihood: Likelihood) -> Delta:
    """The gradient of each example's −log p(y | output) by the output."""  # (job, example, output), (job, example, …)
    return of_classes if likelihood.is_plain else partial(by_autograd, likelihood)


def of_classes(output: Tensor, y: Tensor) -> Tensor:
    """softmax − 1[y]."""
    # A fifth of the time that softmax() takes where there are few classes: it goes from row to row.
    delta = (output - output.amax(-1, keepdim=True)).exp_()
    delta.div_(delta.sum(-1, keepdim=True))
    return delta.scatter_add_(-1, y[..., None], delta.new_tensor(-1.0).expand(*y.shape, 1))


def by_autograd(likelihood: Likelihood, output: Tensor, y: Tensor) -> Tensor:
    """The same of any likelihood, whose terms of single examples do not touch each other."""
    with torch.enable_grad():
        leaf = output.detach().flatten(0, 1).requires_grad_()
        loss = -likelihood.log_prob(leaf, y.flatten(0, 1)).sum()
    return torch.autograd.grad(loss, leaf)[0].view_as(output)
