"""The networks of many clients on one device, stacked: what they do at the same time is done by the same operations.

This is for GPUs, which are idle with one small batch at a time, and for many small clients on a CPU; with larger ones
a CPU is twice as fast with one after the other.

Clients draw the same batches and the same dropout masks as alone, so results are the same but for rounding: sums are
taken in another order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bcfl.client import fisher
from bcfl.client.examples import CHUNK, Examples
from bcfl.client.score import Question, floored
from bcfl.client.trainer import Job, Training, fisher_rows
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
    ):
        self.device, self._template = device, model
        self.num_parameters, self.length = model.num_parameters, len(model.vector)
        # The data are on the device once and for all. The clients' pools are kept too, so that no other gets their id.
        self._pools = {id(held.x): (held, held.x.to(device), held.y.to(device)) for held in examples}
        # A model that draws from torch's global generator repeats its draws only if nobody else draws in between.
        self.model = VmappedModel(model, device, examples[0].batch, len(examples[0]), one_by_one=draws_globally)
        numbers = VECTORS_PER_JOB * self.length + 2 * self.model.num_activations(max(training.batch_size, 2))
        memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else MEMORY_ON_CPU
        self.at_a_time = 1 if draws_globally else min(max(memory // (4 * numbers), 1), MOST_JOBS)
        self._examples_at_a_time = self.at_a_time * training.batch_size
        self._closed = fisher.is_known(model.module) and self._has_closed_form(examples[0])

    def rows(self, vectors: Sequence[Tensor]) -> Tensor:
        return torch.stack([vector.to(self.device) for vector in vectors])

    @contextmanager
    def training(self, jobs: Sequence[Job], means: Tensor) -> Iterator[None]:
        self._means, self._counters = means[:, : self.length], self.model.counters(len(jobs))
        yield
        del self._means, self._counters

    def gradients(self, jobs: Sequence[Job], rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        masks = self.model.masks([job.generator for job in jobs], rows.shape[1])
        places = torch.stack([job.examples.index[part] for job, part in zip(jobs, rows, strict=True)])
        theta, statistics = self._means.tensor_split([self.num_parameters], 1)
        batch = self._batch(jobs[0].examples, places)
        gradient, after, self._counters = self.model.gradients(theta, statistics, self._counters, masks, *batch)
        statistics.copy_(after)
        yield slice(None), gradient

    def exact_fisher(self, jobs: Sequence[Job]) -> Tensor:
        return torch.stack([self._exact_fisher(*of_job) for of_job in zip(jobs, self._means, strict=True)])

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
        views = self._template.parameter_views(found)
        for name, squares in fisher.squares_by_layer(self._template.module.eval(), forward, x, y):
            views[name].add_(squares.view_as(views[name]), alpha=share)

    def _has_closed_form(self, examples: Examples) -> bool:
        """Whether the closed form gives what autograd gives of single examples."""
        rows, vector = examples.index[: fisher.TRIED], self._template.vector.to(self.device)
        x, y = self._batch(examples, rows)
        found = torch.zeros_like(vector[: self.num_parameters])
        try:
            self._add_squares(found, vector, x, y, 1.0)
        except Exception:  # a user's model may do anything
            return False
        return fisher.agree(found, self.model.example_gradients(vector, x, y).square().sum(0))

    def log_likelihoods(self, questions: Sequence[Question]) -> list[Tensor]:
        found = []
        for asked, outputs in zip(questions, self._outputs(questions), strict=True):
            y = asked.examples.y[asked.examples.index[asked.rows]].expand(len(asked.vectors), -1)
            found.append(floored(-F.cross_entropy(outputs.movedim(2, 1), y, reduction="none")))
        return found

    def log_probabilities(self, questions: Sequence[Question]) -> list[Tensor]:
        return [floored(outputs.log_softmax(2)) for outputs in self._outputs(questions)]

    def _outputs(self, questions: Sequence[Question]) -> list[Tensor]:
        """The models' outputs on each question's examples, on the CPU: (model, example, class).

        As a rule examples do not touch each other in evaluation mode: all that a model is asked about is one batch.
        """
        loads: dict[int, _Load] = {}  # each distinct model once
        for i, asked in enumerate(questions):
            for m, vector in enumerate(asked.vectors):
                load = loads.setdefault(vector.data_ptr(), _Load(vector[: self.length]))
                load.places.append((i, m))
                load.rows.append(asked.examples.index[asked.rows])
        found: dict[tuple[int, int], Tensor] = {}  # (question, model) -> (example, class)
        waiting = iter(sorted(loads.values(), key=_Load.__len__))  # those of like length side by side
        while bunch := list(islice(waiting, 1 if self.model.mixes_examples else self.at_a_time)):
            vectors = self.rows([load.vector for load in bunch])
            if self.model.mixes_examples:  # the batches that a client alone takes
                parts = [part[None] for rows in bunch[0].rows for part in rows.split(CHUNK)]
            else:
                padded = pad_sequence([torch.cat(load.rows) for load in bunch], batch_first=True)  # with any row
                parts = padded.split(max(self._examples_at_a_time // len(bunch), 1), 1)
            said = [self.model.outputs(vectors, self._batch(questions[0].examples, part)[0]) for part in parts]
            for load, output in zip(bunch, torch.cat(said, 1).cpu(), strict=True):
                found |= zip(load.places, output[: len(load)].split([len(rows) for rows in load.rows]), strict=True)
        of = (range(len(asked.vectors)) for asked in questions)
        return [torch.stack([found[i, m] for m in models]) for i, models in enumerate(of)]

    def _batch(self, examples: Examples, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels on the device, of rows of the pool that these examples are from."""
        _, x, y = self._pools[id(examples.x)]
        rows = rows.to(self.device)
        chosen = x.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        return (chosen.movedim(-1, -3) if examples.images else chosen), y[rows]


@dataclass(frozen=True)
class _Load:
    """A model, the rows it is asked about, and for which model of which question."""

    vector: Tensor
    rows: list[Tensor] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.rows))
