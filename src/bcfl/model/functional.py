"""A module called with other numbers than its own."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call


def call(module: nn.Module, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """module(x) with these parameters and buffers, named as by `named_parameters()`, instead of its own.

    torch's functional_call alone would leave its numbers for good in a layer that the module calls in two places: it
    takes the second name for another layer, and puts back there what the first one had brought.
    """
    name_of = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    complete = {}  # under one name for each layer, and the numbers that layers share under one for each of them
    for prefix, layer in module.named_modules():
        for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            name = name_of.get(id(tensor), "")  # a missing one is None
            if name in values:
                complete[f"{prefix}.{key}".lstrip(".")] = values[name]
    output: Tensor = functional_call(module, complete, (x,), tie_weights=False)
    return output
