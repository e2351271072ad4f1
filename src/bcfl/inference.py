"""Forward passes without gradients, in the order and memory layout in which a CPU does them fastest.

Scoring a convolutional net is mostly convolutions. In oneDNN's own blocked layout they take two thirds of the time that
they take on images in channels-last format, and what stands around them nearly vanishes: BatchNorm is folded into the
weights, and ReLU comes after pooling, on a quarter of the numbers, instead of before it. All of it is float32; only the
order of the sums is another, so scores agree to about a millionth.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

OVERFLOW = 1e37  # no activation may exceed it: oneDNN's ReLU makes 0 of NaN, and a diverged model must not look sound


@dataclass
class Block:
    """A convolution and what follows it up to the next."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d | None = None
    relu: bool = False
    pool: nn.MaxPool2d | None = None  # after ReLU or before it: the results are the same

    def take(self, layer: nn.Module) -> bool:
        """Make the layer that comes next a part of the block, if it can be one."""
        bare = not self.relu and self.pool is None
        if type(layer) is nn.BatchNorm2d and bare and self.norm is None and layer.running_mean is not None:
            self.norm = layer
        elif type(layer) is nn.ReLU:
            self.relu = True
        elif type(layer) is nn.MaxPool2d and self.pool is None and _is_plain(layer):
            self.pool = layer
        else:
            return False
        return True

    def folded(self) -> tuple[Tensor, Tensor]:
        """The weights and biases of convolution and normalisation in one."""
        weight, bias, norm = self.convolution.weight, self.convolution.bias, self.norm
        if norm is None:
            return weight, torch.zeros(len(weight)) if bias is None else bias
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None  # or it would not have been taken
        assert variance is not None
        return fuse_conv_bn_weights(weight, bias, mean, variance, norm.eps, norm.weight, norm.bias)


class Convolutions:
    """The forward pass of a plain stack of convolutions with a classifier on top."""

    def __init__(self, module: nn.Module, blocks: list[Block], classifier: nn.Sequential):
        self._module, self._blocks, self._classifier = module, blocks, classifier

    def loaded(self) -> Callable[[Tensor], Tensor]:
        """The pass with the parameters that the module holds now."""
        folded = [block.folded() for block in self._blocks]
        largest = largest_input(folded)
        layers = [
            (block, weight.contiguous().to_mkldnn(), bias.to_mkldnn())
            for block, (weight, bias) in zip(self._blocks, folded, strict=True)
        ]

        def scores(x: Tensor) -> Tensor:
            if not bool(x.abs().amax() <= largest):  # nor with NaN
                return self._module(x)  # type: ignore[no-any-return]
            x = x.contiguous().to_mkldnn()
            for block, weight, bias in layers:
                convolution = block.convolution
                x = F.conv2d(x, weight, bias, convolution.stride, convolution.padding, convolution.dilation)
                x = x if block.pool is None else block.pool(x)
                x = x.relu_() if block.relu else x
            return self._classifier(x.to_dense().flatten(1))  # type: ignore[no-any-return]

        return scores


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
    if type(module) is not nn.Sequential or _is_watched(module) or not torch.backends.mkldnn.is_available():
        return None
    blocks: list[Block] = []
    for place, layer in enumerate(module):
        if _is_watched(layer):
            return None
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            classifier = nn.Sequential(*list(module)[place + 1 :])
            return Convolutions(module, blocks, classifier) if blocks else None
        if type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
            blocks.append(Block(layer))
        elif not (blocks and blocks[-1].take(layer)):
            return None
    return None


def _is_plain(pool: nn.MaxPool2d) -> bool:
    """Whether oneDNN can do it: neither places of the maxima nor dilation."""
    return not pool.return_indices and pool.dilation in (1, (1, 1))


def _is_watched(layer: nn.Module) -> bool:
    """Whether somebody wants to be told when the layer is called; the fast pass would not call it."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)
