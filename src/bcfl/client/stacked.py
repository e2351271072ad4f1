"""Many clients on one device, stacked: what they do at the same time is done by the same operations, for all of them.

This is for GPUs, which are idle with one small batch at a time. On a CPU one client after the other is twice as fast.

Clients draw the same batches and the same dropout masks as in the simulator's threads, so results are the same but for
rounding: sums are taken in another order.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bcfl.belief.gaussian import Gaussian
from bcfl.client.examples import CHUNK, Examples, batches
from bcfl.client.fisher import CHUNK as FISHER_CHUNK
from bcfl.client.meeting import Meeting
from bcfl.client.score import floored
from bcfl.client.stacked_model import StackedModel
from bcfl.client.trainer import Training, needs_exact_fisher, proximal_pull, pull_in_step
from bcfl.model.flat import FlatModel

T = TypeVar("T")
DEVICES = "cpu, cuda, cuda:N, stacked-cpu"
MOST_JOBS = 256  # at a time: beyond it a device is busy anyway
MEMORY_ON_CPU = 2**30  # bytes
# What a job holds of its vector's length: parameters, momentum, gradient and its parts, prior mean and precision, pull,
# Fisher, the posterior's mean and precision.
VECTORS_PER_JOB = 10


def find_device(name: str) -> torch.device | None:
    """The device on which clients are stacked; None for "cpu", where they are trained in threads."""
    kind, colon, number = name.partition(":")
    if name == "cpu":
        return None
    if name == "stacked-cpu":
        return torch.device("cpu")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f"device must be one of {DEVICES}, got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count)), "stacked-cpu"])
        raise ValueError(f"device {name!r} is not here: torch {torch.__version__} finds {count} CUDA devices; "
                         f"allowed here: {here}")  # fmt: skip
    return torch.device(name)


@dataclass(frozen=True)
class _Fit:
    """A training that is asked for."""

    start: Tensor
    prior: Gaussian
    examples: Examples
    training: Training
    generator: torch.Generator
    curvature: bool
    num_steps: int
    momentum: Tensor | None

    @property
    def kind(self) -> Hashable:
        """Jobs of one kind are stacked."""
        carries = self.momentum is not None, len(self.start)
        sizes = self.batch_size, self.num_steps
        return id(self.examples.x), sizes, self.curvature, self.exact_fisher, self.training, carries

    @property
    def batch_size(self) -> int:
        return min(self.training.batch_size, len(self.examples))

    @property
    def exact_fisher(self) -> bool:
        return needs_exact_fisher(self.training, len(self.examples))


@dataclass(frozen=True)
class _Outputs:
    """What each model says of some examples of a client."""

    vectors: Tensor | Sequence[Tensor]  # (model, vector)
    examples: Examples
    rows: Tensor

    @property
    def kind(self) -> Hashable:
        return id(self.examples.x)


class Stack:
    """Learns for the clients of tasks that are played side by side; in a task it is used like the plain trainer."""

    def __init__(
        self,
        model: FlatModel,
        device: torch.device,
        examples: Sequence[Examples],
        training: Training,
        draws_globally: bool,
    ):
        self.device, self._template = device, model
        # The data are on the device once and for all. The clients' pools are kept too, so that no other gets their id.
        self._pools = {id(own.x): (own, own.x.to(device), own.y.to(device)) for own in examples}
        # A model that draws from torch's global generator repeats its draws only if nobody else draws in between.
        self.model = StackedModel(model, device, examples[0], one_by_one=draws_globally)
        numbers = VECTORS_PER_JOB * len(model.vector) + 2 * self.model.num_activations(max(training.batch_size, 2))
        memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else MEMORY_ON_CPU
        self.jobs_at_a_time = 1 if draws_globally else min(max(memory // (4 * numbers), 1), MOST_JOBS)
        self._examples_at_a_time = self.jobs_at_a_time * training.batch_size
        self._meeting: Meeting[_Fit | _Outputs] = Meeting(self._answer, self.jobs_at_a_time)

    def stream(self, tasks: Iterable[Callable[[FlatModel], T]]) -> Iterator[T]:
        """The results of the tasks, in their order."""
        return self._meeting.stream(partial(task, self._template) for task in tasks)

    def close(self) -> None:
        self._meeting.close()

    def fit(
        self,
        model: FlatModel,
        start: Tensor,
        prior: Gaussian,
        examples: Examples,
        training: Training,
        generator: torch.Generator,
        *,
        curvature: bool,
        num_steps: int | None = None,
        momentum: Tensor | None = None,
    ) -> tuple[Gaussian, Tensor]:
        """As fit."""
        steps = num_steps or training.local_steps
        asked = _Fit(start, prior, examples, training, generator, curvature, steps, momentum)
        answer: tuple[Gaussian, Tensor] = self._meeting.ask(asked)
        return answer

    def log_likelihoods(
        self, model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor
    ) -> Tensor:
        """As log_likelihoods."""  # (model, example)
        outputs: Tensor = self._meeting.ask(_Outputs(vectors, examples, rows))
        y = examples.y[examples.index[rows]].expand(len(vectors), -1)
        return floored(-F.cross_entropy(outputs.movedim(2, 1), y, reduction="none"))

    def log_probabilities(
        self, model: FlatModel, vectors: Tensor | Sequence[Tensor], examples: Examples, rows: Tensor
    ) -> Tensor:
        """As log_probabilities."""  # (model, example, class)
        outputs: Tensor = self._meeting.ask(_Outputs(vectors, examples, rows))
        return floored(outputs.log_softmax(2))

    def _answer(self, questions: Sequence[_Fit | _Outputs]) -> list[Any]:
        alike: dict[Hashable, list[int]] = {}
        for i, asked in enumerate(questions):
            alike.setdefault(asked.kind, []).append(i)
        answers: dict[int, Any] = {}
        for places in alike.values():
            fits = [asked for i in places if isinstance(asked := questions[i], _Fit)]
            outputs = [asked for i in places if isinstance(asked := questions[i], _Outputs)]
            answers |= dict(zip(places, self._fit(fits) if fits else self._outputs(outputs), strict=True))
        return [answers[i] for i in range(len(questions))]

    def _fit(self, jobs: Sequence[_Fit]) -> list[tuple[Gaussian, Tensor]]:
        """fit of jobs of one kind: what is a vector there has a first axis of jobs here."""
        first, model, num_parameters = jobs[0], self._template, self._template.num_parameters
        training, size, num_steps = first.training, first.batch_size, first.num_steps
        start = torch.stack([job.start for job in jobs]).to(self.device)
        theta, statistics, carried = start.tensor_split((num_parameters, len(model.vector)), 1)
        theta = theta.clone()
        if first.momentum is not None:
            velocity = torch.stack([job.momentum for job in jobs if job.momentum is not None]).to(self.device)
        else:
            velocity = carried.clone() if carried.numel() else torch.zeros_like(theta)
        prior_mean, precision = (
            torch.stack([values[:num_parameters] for values in of_jobs]).to(self.device)
            for of_jobs in zip(*((job.prior.mean, job.prior.precision) for job in jobs), strict=True)
        )
        num_examples = torch.tensor([float(len(job.examples)) for job in jobs], device=self.device)[:, None]
        pull = proximal_pull(precision, num_examples, training)
        fisher = torch.zeros_like(theta) if first.curvature and not first.exact_fisher else None
        drawn = (batches(len(job.examples), size, num_steps, job.generator) for job in jobs)
        rows = torch.stack([job.examples.index[torch.stack(list(own))] for job, own in zip(jobs, drawn, strict=True)])
        counters = self.model.counters(len(jobs))

        for step in range(num_steps):
            masks = self.model.masks([job.generator for job in jobs], size)
            batch = self._batch(first.examples, rows[:, step])
            gradient, statistics, counters = self.model.gradients(theta, statistics, counters, masks, *batch)
            if fisher is not None:
                fisher.addcmul_(gradient, gradient, value=size / num_steps)
            velocity.mul_(training.momentum).add_(gradient)
            theta.sub_(velocity, alpha=training.learning_rate)
            if (own_pull := pull_in_step(step + 1, pull, training)) is not None:
                theta.lerp_(prior_mean, own_pull)

        vector = torch.cat([theta, statistics], 1)
        if first.curvature:
            if fisher is None:
                fisher = torch.stack([self._exact_fisher(*of_job) for of_job in zip(vector, jobs, strict=True)])
            precision.addcmul_(num_examples, fisher)
        means = torch.cat([vector, velocity], 1) if carried.numel() else vector
        return [_posterior(job, *own) for job, *own in zip(jobs, means, precision, velocity, strict=True)]

    def _exact_fisher(self, vector: Tensor, job: _Fit) -> Tensor:
        """As exact_fisher."""  # (parameter,)
        rows = torch.randperm(len(job.examples), generator=job.generator)[: job.training.fisher_examples]
        fisher = torch.zeros_like(vector[: self._template.num_parameters])
        for part in job.examples.index[rows].split(min(FISHER_CHUNK, self.jobs_at_a_time)):
            gradients = self.model.example_gradients(vector, *self._batch(job.examples, part))
            fisher.add_(gradients.square().sum(0), alpha=1 / len(rows))
        return fisher

    def _outputs(self, questions: Sequence[_Outputs]) -> list[Tensor]:
        """The models' outputs on each question's examples, on the CPU: (model, example, class).

        As a rule examples do not touch each other in evaluation mode: all that a model is asked about is one batch.
        """
        loads: dict[int, _Load] = {}  # each distinct model once
        for i, asked in enumerate(questions):
            for m, vector in enumerate(asked.vectors):
                load = loads.setdefault(vector.data_ptr(), _Load(vector[: len(self._template.vector)]))
                load.places.append((i, m))
                load.rows.append(asked.examples.index[asked.rows])
        found: dict[tuple[int, int], Tensor] = {}  # (question, model) -> (example, class)
        waiting = iter(sorted(loads.values(), key=_Load.__len__))  # those of like length side by side
        while bunch := list(islice(waiting, 1 if self.model.mixes_examples else self.jobs_at_a_time)):
            vectors = torch.stack([load.vector for load in bunch]).to(self.device)
            if self.model.mixes_examples:  # the batches that the plain simulator takes
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


def _posterior(job: _Fit, mean: Tensor, precision: Tensor, velocity: Tensor) -> tuple[Gaussian, Tensor]:
    """A job's answer, on the CPU and in memory of its own: it may be kept for long."""
    mean, velocity, num_examples = mean.to("cpu", copy=True), velocity.to("cpu", copy=True), float(len(job.examples))
    if not job.curvature:
        return Gaussian(mean, torch.tensor(num_examples).expand(len(mean))), velocity
    learned = torch.full_like(mean, num_examples)
    learned[: len(precision)] = precision
    return Gaussian(mean, learned), velocity
