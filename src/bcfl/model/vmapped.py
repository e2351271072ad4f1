"""One model as functions of stacked vectors: the gradients of many trainings, the outputs of many models, at once."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, vmap

from bcfl.likelihood import mean_loss
from bcfl.model.flat import FlatModel, SeededDropout, views
from bcfl.model.functional import call

logger = logging.getLogger(__name__)
Batch = Callable[[Tensor], tuple[Tensor, Tensor]]  # inputs and labels of rows
Stacked = Callable[..., tuple[Tensor, ...]]  # of tensors that share a first axis
Loss = tuple[Tensor, tuple[Tensor, ...]]  # or its gradient; and what else is to be known of the pass


class VmappedModel:
    """The functions of a FlatModel's module, by `vmap` over the first axis of everything they are given.

    Where `vmap` cannot do it, or does otherwise than the module itself (it is tried on some of the examples that
    `batch` takes rows of), or is not wanted, it is done one by one.
    """

    def __init__(
        self,
        model: FlatModel,
        device: torch.device,
        batch: Batch,
        num_examples: int,
        one_by_one: bool,
        tells: bool = True,
    ):
        self.model, self.module, self.device = model, model.module, device
        self._batch, self._num_examples, self._tells = batch, num_examples, tells
        model.load(model.vector)  # counters at their beginning, whatever was done with the model before
        buffers = dict(self.module.named_buffers())
        self._statistics = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._counters = {name: buffer.clone() for name, buffer in buffers.items() if not buffer.is_floating_point()}
        self._dropped: dict[int, list[tuple[SeededDropout, Tensor]]] = {}  # see _dropout_calls
        self._each: Callable[[Stacked], Stacked] = in_turn
        if not one_by_one:
            self._check_swapping()
        self.mixes_examples = self._mixes_examples()
        if not one_by_one and self._can_be_stacked():
            self._each = vmap

    @property
    def is_stacked(self) -> bool:
        """Whether `vmap` does it."""
        return self._each is vmap

    def counters(self, num_jobs: int) -> Sequence[Tensor]:
        """The module's integer buffers (BatchNorm's batch counter) at the beginning, for each job."""  # (job, ...)
        return [c.expand(num_jobs, *c.shape).to(self.device) for c in self._counters.values()]

    def gradients(
        self,
        parameters: Tensor,
        statistics: Tensor,
        counters: Sequence[Tensor],
        masks: Sequence[Tensor],
        x: Tensor,
        y: Tensor,
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Each job's gradient of its mean loss on its batch in training mode, its statistics and counters after it."""
        self.module.train()
        gradient, after, *counted = self._each(self._step)(parameters, statistics, x, y, *counters, *masks)
        return gradient, after, counted

    def example_gradients(self, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of each example's loss by the parameters, in evaluation mode."""  # (example, parameter)
        self.module.eval()
        parameters, statistics = vector.split([self.model.num_parameters, self.model.num_statistics])

        def gradient(x: Tensor, y: Tensor) -> tuple[Tensor]:
            def loss(own: Tensor) -> Loss:
                return mean_loss(self.model.likelihood, self.evaluated(own, statistics, x[None]), y[None]), ()

            return (self._gradient(loss)(parameters)[0],)

        return self._each(gradient)(x, y)[0]

    def outputs(self, vectors: Tensor, x: Tensor) -> Tensor:
        """The outputs of each model on its own examples in evaluation mode."""  # (model, example, class)
        self.module.eval()
        with torch.no_grad():
            return self._each(self._output)(vectors, x)[0]

    def masks(self, generators: Sequence[torch.Generator], batch_size: int) -> list[Tensor]:
        """What the dropout layers keep in one step of each job, drawn from its generator as the layers would."""
        calls, drawn = self._dropout_calls(batch_size), []  # (job, call)
        for generator in generators:
            self.model.seed(generator)
            drawn.append([dropout.draw(like) for dropout, like in calls])
        return [torch.stack(of_call).to(self.device) for of_call in zip(*drawn, strict=True)]  # (call, job, ...)

    def num_activations(self, batch_size: int) -> int:
        """How many numbers a step keeps for its gradient, on a batch of that size."""
        counted = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal counted
            counted += tensor.numel()
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            self._pass(batch_size)
        return counted

    def _pass(self, batch_size: int) -> None:
        """Sends some batch through the module itself, on the CPU, in the layout that batches have there."""
        self.module.train()
        self.model.seed(torch.Generator())
        with torch.random.fork_rng(devices=[]):  # nobody's draws depend on whether this was tried
            self.module(self._batch(torch.zeros(batch_size, dtype=torch.int64))[0])

    def _dropout_calls(self, batch_size: int) -> list[tuple[SeededDropout, Tensor]]:
        """The dropout layers in the order in which a step calls them, each with the shape and layout of its input."""
        if not self.model.dropouts:
            return []
        if batch_size not in self._dropped:
            calls: list[tuple[SeededDropout, Tensor]] = []

            def note(dropout: SeededDropout, inputs: tuple[Tensor]) -> None:
                if dropout.draws:
                    calls.append((dropout, torch.empty_like(inputs[0], device="meta")))

            hooks = [dropout.register_forward_pre_hook(note) for dropout in self.model.dropouts]
            self._pass(batch_size)
            for hook in hooks:
                hook.remove()
            self._dropped[batch_size] = calls
        return self._dropped[batch_size]

    def _step(self, parameters: Tensor, statistics: Tensor, x: Tensor, y: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Of one job: the gradient, and the statistics and counters after the step."""

        def loss(parameters: Tensor) -> Loss:
            # BatchNorm writes into its statistics. Under vmap that is lost, without a word, unless they are contiguous.
            own = [s.clone(memory_format=torch.contiguous_format) for s in self._split(statistics)]
            counted = [counter.clone() for counter in rest[: len(self._counters)]]
            values = self.model.parameter_views(parameters) | self._named(own)
            values |= dict(zip(self._counters, counted, strict=True))
            masks = iter(rest[len(self._counters) :])
            for dropout in self.model.dropouts:
                dropout.masks = masks
            try:
                output = call(self.module, values, x)
            finally:
                for dropout in self.model.dropouts:
                    dropout.masks = None
            return mean_loss(self.model.likelihood, output, y), (torch.cat([*own, statistics[:0]]), *counted)

        gradient, after = self._gradient(loss)(parameters)
        return (gradient, *after)

    def _gradient(self, loss: Callable[[Tensor], Loss]) -> Callable[[Tensor], Loss]:
        """The gradient of a loss, and what comes with the loss; alone by plain autograd, which can do more."""
        return grad(loss, has_aux=True) if self._each is vmap else _autograd(loss)

    def _output(self, vector: Tensor, x: Tensor) -> tuple[Tensor]:
        parameters, statistics = vector.split([self.model.num_parameters, self.model.num_statistics])
        return (self.evaluated(parameters, statistics, x),)

    def evaluated(self, parameters: Tensor, statistics: Tensor, x: Tensor) -> Tensor:
        """The outputs of one model, in the mode that the module is in."""
        values = self.model.parameter_views(parameters) | self._named(self._split(statistics))
        counters = {name: counter.to(x.device) for name, counter in self._counters.items()}
        return call(self.module, values | counters, x)

    def _split(self, statistics: Tensor) -> Sequence[Tensor]:
        return statistics.split([like.numel() for like in self._statistics.values()]) if self._statistics else ()

    def _named(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        of = zip(self._statistics.items(), parts, strict=True)
        return {name: views(part, [like])[0] for (name, like), part in of}

    def _mixes_examples(self) -> bool:
        """Whether in evaluation mode what the model says of an example depends on the others of its batch."""
        x, vector = self._some(4)[0], self.model.vector.to(self.device)
        try:
            with torch.random.fork_rng(devices=[]):
                alone = torch.cat([self.outputs(vector[None], one[None, None])[0] for one in x])
                return not near(self.outputs(vector[None], x[None])[0], alone)
        except ValueError:  # BatchNorm without statistics of its own needs more than one
            return True

    def _some(self, count: int) -> tuple[Tensor, Tensor]:
        x, y = self._batch(torch.arange(min(count, self._num_examples)))
        return x.to(self.device), y.to(self.device)

    def _check_swapping(self) -> None:
        """Raises if the module is another function of its parameters when others are put in their place."""
        x, y = self._some(2)
        vector, draws = 0.9 * self.model.vector.to(self.device)[None], [torch.Generator().manual_seed(0)]
        parameters, statistics = vector.split([self.model.num_parameters, self.model.num_statistics], 1)
        try:
            masks = self.masks(draws, len(x))
            gradient, after, _ = self.gradients(parameters, statistics, self.counters(1), masks, x[None], y[None])
            swapped = (gradient[0], after[0], self.outputs(vector, x[None])[0])
            same = all(map(near, swapped, self._own_answers(vector[0])))
        except Exception as error:  # a user's model may raise anything
            raise ValueError(f"this model runs on device = 'cpu' only: {_reason(error)}") from error
        if not same:
            raise ValueError("this model runs on device = 'cpu' only: with others in the place of its parameters it is "
                             "another function (hooks on parameters, or a list that holds them too?)")  # fmt: skip

    def _own_answers(self, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By the module itself, on the CPU: the gradient of some batch, the statistics after it, and the outputs."""
        x, y = self._batch(torch.arange(min(2, self._num_examples)))
        before, gradient = self.model.vector.clone(), torch.zeros(self.model.num_parameters)
        self.model.load(vector)
        self.model.seed(torch.Generator().manual_seed(0))
        self.module.train()
        for part, piece in self.model.gradients(mean_loss(self.model.likelihood, self.module(x), y)):
            gradient[part] = piece
        after = self.model.vector[self.model.num_parameters :].clone()
        self.model.load(vector)
        with torch.no_grad():
            output = self.module.eval()(x)
        self.model.load(before)
        return gradient.to(self.device), after.to(self.device), output.to(self.device)

    def _can_be_stacked(self) -> bool:
        """Whether vmap over two jobs can be done, and gives what each of them gives alone; if not, that is told."""
        (x, y), vector = self._some(2), self.model.vector.to(self.device)
        vectors, xx, yy = torch.stack([vector, 0.9 * vector]), torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)])
        parameters, statistics = vectors.split([self.model.num_parameters, self.model.num_statistics], 1)
        masks = self.masks([torch.Generator().manual_seed(job) for job in range(2)], len(x))
        found = []
        try:
            for each in (in_turn, vmap):
                self._each = each
                gradient, after, _ = self.gradients(parameters, statistics, self.counters(2), masks, xx, yy)
                found.append((gradient, after, self.outputs(vectors, xx), self.example_gradients(vector, x, y)))
        except Exception as error:  # a user's model may raise anything
            reason = _reason(error)
        else:
            if all(near(stacked, alone) for alone, stacked in zip(*found, strict=True)):
                return True
            reason = "stacked, they would get other numbers"
        finally:
            self._each = in_turn
        if self._tells:
            logger.warning(f"the clients of this model are trained one by one, which is slower, not stacked: {reason}")
        return False


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def near(first: Tensor, second: Tensor) -> bool:
    """Whether two answers differ by no more than rounding, the coarse one of a GPU's TF32 included."""
    first, second = first.nan_to_num(0, 0, 0), second.nan_to_num(0, 0, 0)  # overflow is the data's affair
    return bool((first - second).norm() <= 0.01 * second.norm() + 1e-6)


def _autograd(loss: Callable[[Tensor], Loss]) -> Callable[[Tensor], Loss]:
    """What torch.func.grad(loss, has_aux=True) does, for losses that it cannot do."""

    def gradient(parameters: Tensor) -> Loss:
        leaf = parameters.detach().requires_grad_()
        with torch.enable_grad():
            value, rest = loss(leaf)
        return torch.autograd.grad(value, leaf)[0], tuple(tensor.detach() for tensor in rest)

    return gradient


def in_turn(function: Stacked) -> Stacked:
    """`function` of each row alone, the results stacked: what vmap does, for functions that it cannot do."""

    def stacked(*arguments: Tensor) -> tuple[Tensor, ...]:
        rows = [function(*row) for row in zip(*arguments, strict=True)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    return stacked
