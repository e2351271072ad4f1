"""A torch module as one flat vector, and the modules known by name."""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bcfl.likelihood import likelihood_of, network_of
from bcfl.model.architecture import architecture
from bcfl.model.layout import Kept, Make, Scores, convolutions_of, is_watched, sparse_inputs_of
from bcfl.randomness import stream_seed

ModelFactory = Callable[[], nn.Module]
LARGE = 1 << 18  # numbers: from here on a gradient is taken as autograd leaves it, so many at a time
TOGETHER = 4  # models that are scored in one pass, where that is possible: more would fall out of the cache
MOST_MADE = 64  # first layers that are kept laid out at a time
_GLOBAL_GENERATOR = threading.Lock()  # workers that start together must not mix up their draws
_BUILT: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # the modules that factories have returned


@dataclass(frozen=True)
class SharedModels(Sequence[Tensor]):
    """Models that many clients score, or one client look by look: a wide first layer is laid out once for all of them.

    They must stay as they are meanwhile. Workers share what is made, and nothing hangs on who comes first, as all would
    make the same. Of many models only some are kept so, as it takes memory.
    """

    vectors: Tensor | Sequence[Tensor]  # (model, vector)
    places: Sequence[int]  # of those that are meant
    made: dict[int, Tensor | None] = field(default_factory=dict)  # by place

    @staticmethod
    def of(vectors: Tensor | Sequence[Tensor]) -> "SharedModels":
        """All of them; the same object, if they are shared already."""
        return vectors if isinstance(vectors, SharedModels) else SharedModels(vectors, range(len(vectors)))

    def only(self, places: Sequence[int]) -> "SharedModels":
        """Some of them, by their places in this sequence."""
        return replace(self, places=[self.places[place] for place in places])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return replace(self, places=self.places[place])
        return self.vectors[self.places[place]]

    def kept(self, place: int) -> Kept:
        """What is made of a model, now or by whoever came before."""
        key = self.places[place]

        def made(make: Make) -> Tensor | None:
            if key in self.made:
                return self.made[key]
            return self.made.setdefault(key, make()) if len(self.made) < MOST_MADE else make()

        return made


class FlatModel:
    """A module whose parameters and BatchNorm statistics are views of one vector, and its gradients of another.

    Loading a belief is then one copy and an optimiser step a handful of operations, however many layers there are;
    only large parameters have gradients of their own. Convolution weights lie in the vector in channels-last order,
    the memory format in which a CPU convolves fastest.
    """

    def __init__(self, module: nn.Module):
        refuse_unsuited(module)
        self.module, self.layers = module, architecture(module)
        self.likelihood = likelihood_of(module)
        parameters = list(module.parameters())
        statistics = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self._tensors = [*parameters, *statistics]
        self.num_parameters, self.num_statistics = (sum(t.numel() for t in part) for part in (parameters, statistics))
        self._counters = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_floating_point()]
        self.vector = self._own = torch.zeros(self.num_parameters + self.num_statistics)
        self.parameters = self.vector[: self.num_parameters]
        for tensor, view in zip(self._tensors, views(self.vector, self._tensors), strict=True):
            view.copy_(tensor.detach())
            tensor.data = view
        self.shapes = tuple("×".join(map(str, tensor.shape)) or "1" for tensor in self._tensors)
        self._spots = [(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in self._tensors]
        small = [p for p in parameters if p.numel() < LARGE]
        self.gradient = torch.zeros(sum(p.numel() for p in small))  # of all parameters but the large ones
        for parameter, view in zip(small, views(self.gradient, small), strict=True):
            parameter.grad = view
        self._pieces = list(_pieces(parameters, self.gradient))
        # Where BatchNorm's running variances are in the vector: whoever changes it as a whole must keep them positive.
        self.variances = tuple(
            slice(buffer.storage_offset(), buffer.storage_offset() + buffer.numel())
            for name, buffer in module.named_buffers()
            if name.rpartition(".")[2] == "running_var" and buffer.is_floating_point()
        )
        layer_of = [name.rpartition(".")[0] for name, _ in module.named_parameters()]  # tied parameters stand once
        last = [p for p, layer in zip(parameters, layer_of, strict=True) if layer == layer_of[-1]]
        self.last_layer = module.get_submodule(layer_of[-1])
        self.num_last_layer = sum(p.numel() for p in last)  # they stand last among the parameters
        self.dropouts = _seed_dropout(module)
        self._convolutions, self._sparse_inputs = convolutions_of(module), sparse_inputs_of(module)
        all_names = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        place_of = {id(tensor): place for place, tensor in enumerate(self._tensors)}
        self._places = [(name, place_of[id(tensor)]) for name, tensor in all_names if id(tensor) in place_of]

    def load(self, vector: Tensor) -> None:
        """Take over parameters and statistics; integer buffers (BatchNorm's batch counter) start afresh."""
        self.vector.copy_(vector[: len(self.vector)])
        self._restart_counters()

    @contextmanager
    def living_in(self, vector: Tensor) -> Iterator[None]:
        """Take them over where they are: until the end, what is trained is the vector itself, or its beginning.

        So that an answer of millions of numbers need not be copied out of the model.
        """
        try:
            self._move_to(vector[: len(self.vector)])
            self._restart_counters()
            yield
        finally:
            self._move_to(self._own)

    def _move_to(self, vector: Tensor) -> None:
        self.vector, self.parameters = vector, vector[: self.num_parameters]
        first = vector.storage_offset()
        for tensor, (shape, stride, offset) in zip(self._tensors, self._spots, strict=True):
            tensor.data = vector.as_strided(shape, stride, first + offset)  # a third of the time that views() takes

    def _restart_counters(self) -> None:
        for buffer, initial in self._counters:
            buffer.copy_(initial)

    def scorers(self, vectors: Tensor | Sequence[Tensor]) -> Iterator[Scores]:
        """Class scores under each model as functions of inputs, in evaluation mode.

        A function is for the next few models, as many as are best taken together, and holds until the next one is
        asked for. Not for gradients: see `bcfl.model.layout`.
        """  # (model, vector) -> functions (example, ...) -> (model, example, class)
        self.module.eval()
        if self._convolutions is None:
            for place, vector in enumerate(vectors):
                self.load(vector)
                yield partial(_of_one_model, self._scores_of(vectors, place))
        else:
            num_passes = -(-len(vectors) // TOGETHER) or 1
            size = -(-len(vectors) // num_passes) or 1
            for first in range(0, len(vectors), size):
                yield self._convolutions.scorer([self._state(v) for v in vectors[first : first + size]])

    def _scores_of(self, vectors: Tensor | Sequence[Tensor], place: int) -> Scores:
        """Of the model that was loaded from there."""
        if self._sparse_inputs is None:
            return self.module
        if isinstance(vectors, SharedModels):
            return self._sparse_inputs.scorer(vectors.kept(place))
        return self._sparse_inputs.scorer()

    def _state(self, vector: Tensor) -> dict[str, Tensor]:
        """`vector` (or its beginning) seen as the module's parameters and statistics, by their names."""
        seen = views(vector[: len(self.vector)].contiguous(), self._tensors)
        return {name: seen[place] for name, place in self._places}

    def gradients(self, loss: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The gradient of the loss, piece by piece with its place among the parameters; a piece lives until the next.

        Zeroing a large gradient and adding to it costs as much as the optimiser step itself, so it is neither. And its
        pieces are no larger than what stays in the cache while all is done that is to be done with it.
        """
        self.gradient.zero_()
        for _, piece in self._pieces:  # of a training that was interrupted
            if isinstance(piece, nn.Parameter):
                piece.grad = None
        loss.backward()
        for place, piece in self._pieces:
            if isinstance(piece, nn.Parameter):
                found = torch.zeros_like(piece) if piece.grad is None else piece.grad
                piece.grad = None
                first = place.start
                for part in _laid_out(found.to_dense() if found.is_sparse else found).reshape(-1).split(LARGE):
                    yield slice(first, first + len(part)), part
                    first += len(part)
            else:
                yield place, piece

    @property
    def frozen(self) -> Tensor:
        """Which of the parameters are never trained (requires_grad=False)."""  # (parameter,) bool
        return torch.cat([torch.full((p.numel(),), not p.requires_grad) for p in self.module.parameters()])

    def seed(self, generator: torch.Generator) -> None:
        """Let every dropout layer draw from `generator`."""
        for dropout in self.dropouts:
            dropout.generator = generator

    def parameter_views(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` (parameter,) seen as tensors with the names and shapes of the module's parameters.

        A gradient with respect to `flat` is 0 for those that are frozen.
        """
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        seen = zip(names, parameters, views(flat, parameters), strict=True)
        return {name: view if parameter.requires_grad else view.detach() for name, parameter, view in seen}

    def replaced(self) -> str | None:
        """The name of a parameter or statistic that the module no longer keeps in the vector, if there is one."""
        named = (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers())
        kept = {tensor.data_ptr() for tensor in views(self.vector, self._tensors)}
        floating = ((name, tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel())
        return next((name for name, tensor in floating if tensor.data_ptr() not in kept), None)


def refuse_unsuited(module: nn.Module) -> None:
    """Nothing happens if the module's parameters and statistics can be a vector's, and something of it is trained."""
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError("model has lazy layers: call it on an example of its input before it is given away")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("model has no parameters to train")
    statistics = [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
    named = [*module.named_parameters(), *statistics]
    for name, tensor in named:
        if tensor.dtype != torch.float32:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"model must have float32 parameters and statistics, {name} is {kind}: use .float()")
    for name, tensor in named:
        if not tensor.isfinite().all():
            raise ValueError(f"model must start with finite parameters and statistics, {name} does not: a mask can be "
                             "boolean, or made in forward")  # fmt: skip


def _of_one_model(scores: Scores, x: Tensor) -> Tensor:
    return scores(x)[None]  # (model, example, class)


def _pieces(parameters: Sequence[nn.Parameter], gradient: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Large parameters one by one, the others in runs of neighbours with their part of `gradient`."""
    offset = taken = 0
    for large, run in itertools.groupby(parameters, lambda p: p.numel() >= LARGE):
        for parts in ([p] for p in run) if large else [list(run)]:
            size = sum(p.numel() for p in parts)
            yield slice(offset, offset + size), parts[0] if large else gradient[taken : taken + size]
            offset, taken = offset + size, taken + (0 if large else size)


def _laid_out(tensor: Tensor) -> Tensor:
    """The tensor with its axes in the order of the flat vector."""
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat` (number,) seen as tensors with the shapes of `like`, in their order."""
    return [_view(part, tensor) for part, tensor in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def _view(part: Tensor, like: Tensor) -> Tensor:
    if like.dim() != 4:
        return part.view(like.shape)
    out, into, height, width = like.shape
    return part.view(out, height, width, into).permute(0, 3, 1, 2)


class SeededDropout(nn.Dropout):
    """Dropout that draws from a generator of its own: torch's global one is shared by all worker threads."""

    generator: torch.Generator | None = None
    masks: Iterator[Tensor] | None = None  # drawn beforehand, in the order in which they are used

    @property
    def draws(self) -> bool:
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.draws:
            return x
        keep = self.draw(x) if self.masks is None else next(self.masks)
        return x * keep / (1 - self.p) if self.p < 1 else x * keep

    def draw(self, like: Tensor) -> Tensor:
        """A mask of that shape, 1 for what is kept; also of that layout, as draws fill memory in its own order."""
        return torch.empty_like(like, device="cpu").bernoulli_(1 - self.p, generator=self.generator)


def _seed_dropout(module: nn.Module) -> list[SeededDropout]:
    """Swap every plain nn.Dropout for one that can be seeded, in place."""
    swapped = []
    for parent in module.modules():
        for name, child in parent._modules.items():  # named_children() would skip a layer that stands there twice
            if type(child) is nn.Dropout and not is_watched(child):  # one that is would lose who watches it
                swapped.append(SeededDropout(child.p).train(child.training))
                setattr(parent, name, swapped[-1])
    return swapped


def build(factory: ModelFactory, seed: int, *path: int | str) -> nn.Module:
    """A module initialised by a stream of its own; torch's global generator is left as it was."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ValueError("model must be a function that returns a new torch.nn.Module, such as lambda: Net(), "
                         f"got {type(factory).__name__}")  # fmt: skip
    with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "model", *path))
        module = factory()
        if not isinstance(module, nn.Module):
            raise ValueError(f"model factory must return a torch.nn.Module, got {type(module).__name__}")
        if network_of(module) in _BUILT:  # workers would train in each other's numbers
            raise ValueError("model factory must return a new module whenever it is called: made anew, or, for methods "
                             "that start from one model, copy.deepcopy(net)")  # fmt: skip
        _BUILT.add(network_of(module))
    return module
