"""Forward passes without gradients, in the order and memory layout in which a CPU does them fastest.

Scoring a convolutional net is mostly convolutions. In oneDNN's own blocked layout they take two thirds of the time that
they take on images in channels-last format, and what stands around them nearly vanishes: BatchNorm is folded into the
weights, and ReLU comes after pooling, on a quarter of the numbers, instead of before it. All of it is float32; only the
order of the sums is another, so scores agree to about a millionth.

Several models are scored in one pass: each layer is a convolution with one group of channels per model, and the first,
which has few input channels and so is far from the processor's peak, reads the images once for all of them. Groups
are filled up with channels of zeros to whole blocks, as oneDNN is slow with others.

Scoring word counts is mostly the multiplication of zeros by a wide first layer: it is left out (`SparseInputs`).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from bcfl.model.functional import call

Scores = Callable[[Tensor], Tensor]
Make = Callable[[], Tensor | None]
Kept = Callable[[Make], Tensor | None]  # from how a thing is made to the thing: made now, or kept from before
State = Mapping[str, Tensor]  # a model's parameters and statistics, by the names that they have in the module
BLOCK = 8  # channels that lie side by side in oneDNN's layout
WIDE = 1 << 18  # weights: a layer of fewer is multiplied out sooner than it is asked which inputs are zero
MOST_NONZERO = 0.1  # share of the inputs up to which it is faster to add up the others' columns
FEWEST_ROWS = 32  # inputs for which it pays to turn the layer's weights around
OVERFLOW = 1e37  # no activation may exceed it: oneDNN's ReLU makes 0 of NaN, and a diverged model must not look sound


@dataclass
class Block:
    """A convolution and what follows it up to the next; of the layers that have parameters, their names too."""

    name: str
    convolution: nn.Conv2d
    norm: tuple[str, nn.BatchNorm2d] | None = None
    relu: bool = False
    pool: nn.MaxPool2d | None = None  # after ReLU or before it: the results are the same

    def take(self, name: str, layer: nn.Module) -> bool:
        """Make the layer that comes next a part of the block, if it can be one."""
        bare = not self.relu and self.pool is None
        if type(layer) is nn.BatchNorm2d and bare and self.norm is None and layer.running_mean is not None:
            self.norm = name, layer
        elif type(layer) is nn.ReLU:
            self.relu = True
        elif type(layer) is nn.MaxPool2d and self.pool is None and _is_plain(layer):
            self.pool = layer
        else:
            return False
        return True

    def folded(self, state: State) -> tuple[Tensor, Tensor]:
        """A model's weights and biases of convolution and normalisation in one."""
        weight, bias = state[f"{self.name}.weight"], state.get(f"{self.name}.bias")
        if self.norm is None:
            return weight, torch.zeros(len(weight)) if bias is None else bias
        name, norm = self.norm
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        scale, shift = state.get(f"{name}.weight"), state.get(f"{name}.bias")
        return fuse_conv_bn_weights(weight, bias, mean, variance, norm.eps, scale, shift)


class Convolutions:
    """The forward pass of a plain stack of convolutions with a classifier on top."""

    def __init__(self, module: nn.Module, blocks: list[Block], classifier: nn.Module):
        self._module, self._blocks, self._classifier = module, blocks, classifier

    def scorer(self, states: Sequence[State]) -> Scores:
        """Class scores under each of the models."""  # (example, ...) -> (model, example, class)
        folded = [[block.folded(state) for block in self._blocks] for state in states]
        largest = [largest_input(layers) for layers in folded]
        if len(states) > 1:
            folded = [_in_whole_blocks(of_model) for of_model in folded]
        layers: list[tuple[Block, int, Tensor, Tensor]] = []
        for block, of_models in zip(self._blocks, zip(*folded, strict=True), strict=True):
            weights, biases = zip(*of_models, strict=True)
            groups = len(states) if layers else 1  # the first layer's input is the same for all
            layers.append((block, groups, torch.cat(weights).contiguous().to_mkldnn(), torch.cat(biases).to_mkldnn()))
        channels = self._blocks[-1].convolution.out_channels

        def scores(x: Tensor) -> Tensor:
            size = float(x.abs().amax())
            if not all(size <= allowed for allowed in largest):  # nor with NaN
                if len(states) > 1:
                    return torch.cat([self.scorer([state])(x) for state in states])
                return call(self._module, states[0], x)[None]
            x = x.contiguous().to_mkldnn()
            for block, groups, weight, bias in layers:
                convolution = block.convolution
                x = F.conv2d(x, weight, bias, convolution.stride, convolution.padding, convolution.dilation, groups)
                x = x if block.pool is None else block.pool(x)
                x = x.relu_() if block.relu else x
            features = x.to_dense().unflatten(1, (len(states), -1))[:, :, :channels].flatten(2).unbind(1)
            return torch.stack([call(self._classifier, *own) for own in zip(states, features, strict=True)])

        return scores


def _in_whole_blocks(folded: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same layers with channels of zeros added behind their own, so that each has whole blocks of them."""
    layers, inputs = [], folded[0][0].shape[1]
    for weight, bias in folded:
        more = -len(weight) % BLOCK
        layers.append((F.pad(weight, (0, 0, 0, 0, 0, inputs - weight.shape[1], 0, more)), F.pad(bias, (0, more))))
        inputs = len(weight) + more
    return layers


def largest_input(folded: list[tuple[Tensor, Tensor]]) -> float:
    """The largest input with which surely no activation of these layers overflows; nothing is below NaN."""
    gain, offset, largest = 1.0, 0.0, OVERFLOW  # |activation| <= gain · |input| + offset
    for weight, bias in folded:
        slope = float(weight.double().abs().flatten(1).sum(1).amax())
        gain, offset = gain * slope, offset * slope + float(bias.double().abs().amax())
        largest = min((OVERFLOW - offset) / max(gain, 1.0), largest)  # the first, where it is NaN
    return largest


def convolutions_of(module: nn.Module) -> Convolutions | None:
    """The fast pass of a module that is a plain stack of convolutions, then a classifier; None of any other."""
    if type(module) is not nn.Sequential or is_watched(module) or not torch.backends.mkldnn.is_available():
        return None
    blocks: list[Block] = []
    layers = list(module._modules.items())  # named_children() would skip a layer that stands there twice
    for place, (name, layer) in enumerate(layers):
        if is_watched(layer):
            return None
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            classifier = nn.Sequential(OrderedDict(layers[place + 1 :]))  # with the names that its layers have there
            return Convolutions(module, blocks, classifier) if blocks else None
        if type(layer) is nn.Conv2d and _is_simple(layer):
            blocks.append(Block(name, layer))
        elif not (blocks and blocks[-1].take(name, layer)):
            return None
    return None


def _is_simple(convolution: nn.Conv2d) -> bool:
    """Whether it has one group, and as much padding on one side as on the other, of zeros."""
    extents = zip(convolution.dilation, convolution.kernel_size, strict=True)
    uneven = convolution.padding == "same" and any(step * (size - 1) % 2 for step, size in extents)
    return convolution.groups == 1 and convolution.padding_mode == "zeros" and not uneven


def _is_plain(pool: nn.MaxPool2d) -> bool:
    """Whether oneDNN can do it: neither places of the maxima nor dilation."""
    return not pool.return_indices and pool.dilation in (1, (1, 1))


class SparseInputs:
    """The forward pass of a stack whose first layer is linear and wide, for inputs that are mostly zeros.

    What the layer makes of an input is a sum of its weights' columns, Σᵢ xᵢ·wᵢ, and those of zeros add nothing. Columns
    lie scattered in memory: the weights are turned around once, and then rows of a table are added up.
    """

    def __init__(self, module: Scores, first: nn.Linear, rest: Scores):
        self._module, self._first, self._rest = module, first, rest

    def scorer(self, kept: Kept = lambda make: make()) -> Scores:
        """Class scores under the numbers that the module has now, for as long as it has them.

        `kept` is asked for the weights that are turned around: it may have them from an earlier pass.
        """
        table: Tensor | None = None  # (input, output)

        def scores(x: Tensor) -> Tensor:  # (example, input) -> (example, class)
            nonlocal table
            if x.shape[1:] == (self._first.in_features,) and (table is not None or len(x) >= FEWEST_ROWS):
                nonzero = x.numpy() != 0  # NumPy finds them in a seventh of the time that torch takes
                if np.count_nonzero(nonzero) <= MOST_NONZERO * nonzero.size:
                    table = kept(self._turned) if table is None else table
                    if table is not None:
                        return self._rest(self._summed(x, nonzero, table))
            return self._module(x)

        return scores

    def _turned(self) -> Tensor | None:
        """The weights by inputs; None if one is NaN, infinite or near it: times zero it must not be lost."""
        weights = self._first.weight.detach()  # (output, input)
        flat = weights.reshape(-1)
        # A copy in any case: contiguous() leaves a layer with one output as it is, and the module's numbers may change.
        return weights.t().clone(memory_format=torch.contiguous_format) if bool(flat.dot(flat) < torch.inf) else None

    def _summed(self, x: Tensor, nonzero: npt.NDArray[np.bool_], table: Tensor) -> Tensor:
        """What the first layer makes of the inputs."""  # (example, output)
        places = torch.from_numpy(np.flatnonzero(nonzero))
        counts = torch.from_numpy(nonzero.sum(1))
        begins = counts.cumsum(0) - counts
        weights = x.reshape(-1)[places]
        summed = F.embedding_bag(places % x.shape[1], table, begins, mode="sum", per_sample_weights=weights)
        return summed if self._first.bias is None else summed + self._first.bias


def sparse_inputs_of(module: nn.Module) -> SparseInputs | None:
    """The fast pass of a plain stack that begins with a wide linear layer; None of any other."""
    if type(module) is not nn.Sequential or is_watched(module) or not len(module):
        return None
    first = module[0]
    if type(first) is not nn.Linear or is_watched(first) or first.weight.numel() < WIDE:
        return None
    return SparseInputs(module, first, nn.Sequential(*list(module)[1:]))


def is_watched(layer: nn.Module) -> bool:
    """Whether calling the layer does more, or something else, than its class says: the fast pass would not call it."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or "forward" in vars(layer))
