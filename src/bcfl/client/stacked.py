"""The networks of many clients on one device, stacked: what they do at the same time is done by the same operations.

This is for GPUs, which are idle with one small batch at a time, and for many small clients on a CPU, whose time would
go into calling operations. Plain stacks of linear layers have kernels of their own, others go through `vmap`.

Clients draw the same batches and the same dropout masks as alone, so results are the same but for rounding: sums are
taken in another order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bcfl.client import fisher
from bcfl.client.examples import CHUNK, Examples
from bcfl.client.kernels import Kernels, tried_kernels
from bcfl.client.score import Question
from bcfl.client.trainer import Job, Training, fisher_rows
from bcfl.likelihood.measures import floored
from bcfl.model.flat import FlatModel
from bcfl.model.vmapped import VmappedModel

MOST_JOBS = 256  # at a time: beyond it a device is busy anyway
MEMORY_ON_CPU = 2**30  # bytes
# What a job holds of its vector's length: parameters, momentum, gradient and its parts, prior mean and precision, pull,
# Fisher, the posterior's mean and precision.
VECTORS_PER_JOB = 10


class Stacked:
    """One network with the numbers of many clients, see `bcfl.client.trainer.Network`."""

    def __init__(
        self,
        model: FlatModel,
        device: torch.device,
        examples: Sequence[Examples],
        training: Training,
        draws_globally: bool,
        at_a_time: int | None = None,
        tells: bool = True,
    ):
        self.device, self.template = device, model
        self.num_parameters, self.length = model.num_parameters, len(model.vector)
        self.likelihood = model.likelihood
        # The data are on the device once and for all. The clients' pools are kept too, so that no other gets their id.
        self._pools = {id(held.x): (held, held.x.to(device), held.y.to(device)) for held in examples}
        self._kernels = None if draws_globally else tried_kernels(model, examples[0])
        if self._kernels is None:
            # A model that draws from torch's global generator repeats its draws only if nobody else draws in between.
            self.model = VmappedModel(model, device, examples[0].batch, len(examples[0]), draws_globally, tells)
        self._mixes_examples = self._kernels is None and self.model.mixes_examples
        self.at_a_time = 1 if draws_globally else at_a_time or self._as_many_as_fit(training)
        self._examples_at_a_time = self.at_a_time * training.batch_size
        self._closed = self._kernels is None and fisher.is_known(model.module) and self._has_closed_form(examples[0])

    @property
    def has_kernels(self) -> bool:
        return self._kernels is not None

    @property
    def is_stacked(self) -> bool:
        """Whether several jobs take no more operations than one does."""
        return self.has_kernels or self.model.is_stacked

    def _as_many_as_fit(self, training: Training) -> int:
        """How many jobs the device's memory holds."""
        size = max(training.batch_size, 2)
        kept = size * self._kernels.num_activations if self._kernels else self.model.num_activations(size)
        numbers = VECTORS_PER_JOB * self.length + 2 * kept
        memory = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else MEMORY_ON_CPU
        return min(max(memory // (4 * numbers), 1), MOST_JOBS)

    def rows(self, vectors: Sequence[Tensor]) -> Tensor:
        if all(vector is vectors[0] for vector in vectors):  # jobs that share a belief
            return vectors[0].to(self.device).expand(len(vectors), -1)
        return torch.stack([vector.to(self.device) for vector in vectors])

    @contextmanager
    def training(self, jobs: Sequence[Job], means: Tensor) -> Iterator[None]:
        self._means = means[:, : self.length]
        if self._kernels is None:
            self._counters = self.model.counters(len(jobs))
        # (job, example) -> row of the pool: all examples, as far as the longest has them
        self._places = pad_sequence([job.examples.index for job in jobs], batch_first=True)
        yield
        del self._means, self._places

    def gradients(self, jobs: Sequence[Job], rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        batch = self._batch(jobs[0].examples, self._places.gather(1, rows))
        if self._kernels is not None:
            yield from self._kernels.gradients(self._means, *batch)
            return
        masks = self.model.masks([job.generator for job in jobs], rows.shape[1])
        theta, statistics = self._means.tensor_split([self.num_parameters], 1)
        gradient, after, self._counters = self.model.gradients(theta, statistics, self._counters, masks, *batch)
        statistics.copy_(after)
        yield slice(None), gradient

    def exact_fisher(self, jobs: Sequence[Job]) -> Tensor:
        if self._kernels is not None:
            return self._squares(self._kernels, jobs)
        return torch.stack([self._exact_fisher(*of_job) for of_job in zip(jobs, self._means, strict=True)])

    def _squares(self, kernels: Kernels, jobs: Sequence[Job]) -> Tensor:
        """The exact Fisher information of all jobs together."""
        chosen = [job.examples.index[fisher_rows(job)] for job in jobs]
        share = [torch.full((len(rows),), 1 / len(rows)) for rows in chosen]
        places, shares = (pad_sequence(parts, batch_first=True) for parts in (chosen, share))  # nothing of the padding
        found = torch.zeros_like(self._means[:, : self.num_parameters])
        for some, share_of in zip(places.split(fisher.CHUNK, 1), shares.split(fisher.CHUNK, 1), strict=True):
            batch = self._batch(jobs[0].examples, some)
            for part, squares in kernels.squares(self._means, *batch, share_of.to(self.device)):
                found[:, part] += squares
        return found

    def _exact_fisher(self, job: Job, vector: Tensor) -> Tensor:
        rows = job.examples.index[fisher_rows(job)]
        found, closed = torch.zeros_like(vector[: self.num_parameters]), self._closed and job.training.closed_form
        for part in rows.split(min(fisher.CHUNK, self.at_a_time)):
            x, y = self._batch(job.examples, part)
            if closed:
                self._add_squares(found, vector, x, y, 1 / len(rows))
            else:
                found.add_(self.model.example_gradients(vector, x, y).square().sum(0), alpha=1 / len(rows))
        return found

    def _add_squares(self, found: Tensor, vector: Tensor, x: Tensor, y: Tensor, share: float) -> None:
        forward = partial(self.model.evaluated, *vector.tensor_split([self.num_parameters]))
        views = self.template.parameter_views(found)
        for name, squares in fisher.squares_by_layer(self.template.module.eval(), forward, x, y):
            views[name].add_(squares.view_as(views[name]), alpha=share)

    def _has_closed_form(self, examples: Examples) -> bool:
        """Whether the closed form gives what autograd gives of single examples."""
        rows, vector = examples.index[: fisher.TRIED], self.template.vector.to(self.device)
        x, y = self._batch(examples, rows)
        found = torch.zeros_like(vector[: self.num_parameters])
        try:
            self._add_squares(found, vector, x, y, 1.0)
        except Exception:  # a user's model may do anything
            return False
        return fisher.agree(found, self.model.example_gradients(vector, x, y).square().sum(0))

    def log_likelihoods(self, questions: Sequence[Question]) -> list[Tensor]:
        found = []
        for asked, outputs in zip(questions, self.outputs(questions), strict=True):
            y = asked.examples.y[asked.examples.index[asked.rows]]
            found.append(floored(self.likelihood.of_models(outputs, y)))
        return found

    def outputs(self, questions: Sequence[Question]) -> list[Tensor]:
        """The models' outputs on each question's examples, on the CPU: (model, example, ...).

        As a rule examples do not touch each other in evaluation mode: all that a model is asked about is one batch.
        """
        loads: dict[int, _Load] = {}  # each distinct model once
        for i, asked in enumerate(questions):
            for m, vector in enumerate(asked.vectors):
                load = loads.setdefault(vector.data_ptr(), _Load(vector[: self.length]))
                load.places.append((i, m))
                load.rows.append(asked.examples.index[asked.rows])
        outputs = self.model.outputs if self._kernels is None else self._kernels.outputs
        found: dict[tuple[int, int], Tensor] = {}  # (question, model) -> (example, class)
        waiting = iter(sorted(loads.values(), key=_Load.__len__))  # those of like length side by side
        while bunch := list(islice(waiting, 1 if self._mixes_examples else self.at_a_time)):
            vectors = self.rows([load.vector for load in bunch])
            if self._mixes_examples:  # the batches that a client alone takes
                parts = [part[None] for rows in bunch[0].rows for part in rows.split(CHUNK)]
            else:
                padded = pad_sequence([torch.cat(load.rows) for load in bunch], batch_first=True)  # with any row
                parts = padded.split(max(self._examples_at_a_time // len(bunch), 1), 1)
            said = [outputs(vectors, self._batch(questions[0].examples, part)[0]) for part in parts]
            for load, output in zip(bunch, torch.cat(said, 1).cpu(), strict=True):
                found |= zip(load.places, output[: len(load)].split([len(rows) for rows in load.rows]), strict=True)
        of = (range(len(asked.vectors)) for asked in questions)
        return [torch.stack([found[i, m] for m in models]) for i, models in enumerate(of)]

    def _batch(self, examples: Examples, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels on the device, of rows of the pool that these examples are from."""
        # Those of clients that were opened for this round are not sent as a whole: they come and go.
        _, x, y = self._pools.get(id(examples.x)) or (None, examples.x, examples.y)
        rows = rows.to(x.device)
        chosen = x.index_select(0, rows.flatten()).unflatten(0, rows.shape).to(self.device)
        return (chosen.movedim(-1, -3) if examples.images else chosen), y[rows].to(self.device)


@dataclass(frozen=True)
class _Load:
    """A model, the rows it is asked about, and for which model of which question."""

    vector: Tensor
    rows: list[Tensor] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.rows))
