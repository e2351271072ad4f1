"""Whether inputs are of a size that gradient descent can learn from, told before a run learns nothing of them."""

import torch
from torch import Tensor, nn

SAMPLE = 2000  # examples that are looked at
FAR = 100.0  # times: so far apart, one feature's gradients are 10⁴ times another's
LARGE, SMALL = 1e3, 1e-3  # images of 0 … 255 and counts of words are below the first
NAMED = 3
CHANNELS = {1: (0,), 2: (0, 1), 3: (0,)}  # of an input of so many dimensions: those that may be of different units


def remark_on_scales(x: Tensor) -> str | None:
    """What to do about inputs (example, ...) whose features are of very different or extreme size; None if nothing.

    Zeros do not count, and a feature that is mostly zero is compared with no other: counts of rare words, one-hot
    columns and an image's border are what they are. An image is compared by channels alone.
    """
    rows = x[torch.linspace(0, len(x) - 1, min(len(x), SAMPLE)).long()].double()
    overall = _size(rows.flatten()[None])[0]
    if overall and not SMALL <= overall <= LARGE:
        return (f"inputs are about {overall:.2g} in size, which no usual learning rate suits: bring every feature to "
                "mean 0 and deviation 1, by figures that all clients share")  # fmt: skip
    for axis in CHANNELS.get(rows.dim() - 1, ()):
        features = rows.movedim(axis + 1, 0).flatten(1)  # (feature, number)
        size = torch.where((features != 0).double().mean(1) >= 0.5, _size(features), 0.0)
        known = size.nonzero()[:, 0]
        if len(known) and float(size.max()) > FAR * float(size[known].min()):
            order = known[size[known].argsort()].tolist()
            names = "column" if rows.dim() == 2 else f"position {axis} of"
            small, large = order[: len(order) // 2][:NAMED], order[::-1][: len(order) // 2][:NAMED]
            both = (", ".join(f"{i} ({float(size[i]):.2g})" for i in part) for part in (large, small))
            return (f"inputs differ in scale, {names} {' against '.join(both)}, so that the small ones teach nothing: "
                    "bring every one to mean 0 and deviation 1, by figures that all clients share")  # fmt: skip
    return None


def scales_itself(model: nn.Module) -> bool:
    """Whether the scale of inputs is nothing to the model: it begins with a normalisation or looks words up."""
    layers = [layer for layer in model.modules() if not next(layer.children(), None)]
    first = next((layer for layer in layers if not isinstance(layer, nn.Flatten | nn.Identity)), None)
    name = type(first).__name__
    return "Norm" in name or "Embedding" in name


def _size(features: Tensor) -> Tensor:
    """The root mean square of each feature's numbers that are not zero; 0 where all are."""  # (feature, number)
    return (features.square().sum(1) / (features != 0).sum(1).clamp(min=1)).sqrt()  # (feature,)
