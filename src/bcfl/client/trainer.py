"""The training loop: a batch of jobs in, a local posterior each out.

How a step is made stands here once. A `Network` says how gradients come about: `Alone` takes them from the module
itself, for one job at a time; `bcfl.client.stacked` has those of many jobs at once. All of it is a function of its
arguments: the same jobs give the same bits in any worker.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from bcfl.belief.gaussian import Gaussian, blocks, distinct, even
from bcfl.client.descent import Descent, converged, examples_of, factor_in_step, num_carried
from bcfl.client.examples import Examples, batches
from bcfl.client.fisher import exact_fisher
from bcfl.client.score import Question, log_likelihoods, outputs
from bcfl.likelihood import Likelihood, mean_loss
from bcfl.model.flat import LARGE, FlatModel, ModelFactory, build


@dataclass(frozen=True)
class Training:
    """How clients train: the same for every method."""

    learning_rate: Annotated[
        float, Field(gt=0, le=1e30, description="of the optimiser; the paper's runs have 0.005")
    ] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1, description="of SGD")] = 0.9
    batch_size: Annotated[int, Field(ge=1, description="examples a step")] = 32
    local_steps: Annotated[int, Field(ge=1, le=1_000_000, description="steps a round, each of one batch")] = 10
    momentum_state: Annotated[
        Literal["fresh", "client", "belief"],
        Field(description="momentum starts afresh in every round, stays with the client, or travels with the belief"),
    ] = "belief"
    fisher: Annotated[
        Literal["auto", "examples", "batch", "exact"],
        Field(
            description="precision from the squared gradients of training's batches, but of single examples for a "
            "client of no more than one batch (auto), or always of single examples (examples); batch and exact are "
            "the same two as published runs had them, which took single examples by another way"
        ),
    ] = "auto"
    fisher_examples: Annotated[int, Field(ge=1, description="at most so many single examples")] = 256
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw", "adamax", "rmsprop", "adagrad"],
        Field(description="which of torch's; what it remembers goes the way of momentum_state"),
    ] = "sgd"
    weight_decay: Annotated[
        float, Field(ge=0, le=1e6, description="of weights: added to the gradient, or, of adamw, taken off by itself")
    ] = 0.0
    clip: Annotated[
        Annotated[float, Field(gt=0)] | None, Field(description="the largest norm of a gradient; longer ones are cut")
    ] = None
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Field(description="how the learning rate falls within the steps of a round: not, or to 0"),
    ] = "constant"
    decay: Annotated[
        float, Field(gt=0, le=1, description="by which the learning rate is multiplied from each round to the next")
    ] = 1.0
    local: Annotated[
        Literal["steps", "epochs", "converge"],
        Field(
            description="a round's training is local_steps steps; or local_epochs times all of a client's examples; or "
            "L-BFGS on all of them at once until it converges, in at most local_steps iterations: for small models"
        ),
    ] = "steps"
    local_epochs: Annotated[int, Field(ge=1, le=100_000, description="only with local = epochs")] = 1

    def steps_of(self, num_examples: int) -> int:
        """How many steps a client with so many examples makes in a round."""
        if self.local != "epochs":
            return self.local_steps
        return -(-num_examples * self.local_epochs // min(self.batch_size, num_examples))

    def in_round(self, round_index: int) -> "Training":
        """The same with the learning rate that this round has."""
        if self.decay == 1 or round_index < 2:
            return self
        return replace(self, learning_rate=self.learning_rate * self.decay ** (round_index - 1))

    @property
    def is_plain(self) -> bool:
        """Whether it is SGD with momentum and nothing else."""
        usual = self.optimizer == "sgd" and self.schedule == "constant" and self.local != "converge"
        return usual and not self.weight_decay and self.clip is None

    def num_carried(self, num_parameters: int) -> int:
        """How many numbers a training leaves behind for the next one."""
        return 0 if self.local == "converge" else num_carried(self.optimizer, num_parameters)

    def needs_examples(self, num_examples: int) -> bool:
        """Whether the Fisher information must come from single examples, by the settings or for want of examples.

        A batch of all examples shows no scatter: its mean gradient vanishes at the optimum, and their squares do not.
        """
        return self.fisher in ("exact", "examples") or num_examples <= self.batch_size

    @property
    def closed_form(self) -> bool:
        """Whether single examples' gradients are squared and summed layer by layer, where that can be done."""
        return self.fisher in ("auto", "examples")


@dataclass(frozen=True)
class Job:
    """A training: from where, under which prior, on which examples, and who draws."""

    start: Tensor  # (vector,)
    prior: Gaussian  # of the parameters, at least
    examples: Examples
    generator: torch.Generator
    training: Training
    curvature: bool = False  # whether the posterior's precision is learned; else it counts examples
    num_steps: int | None = None  # if not the usual number
    momentum: Tensor | None = None  # to begin with; else it begins at rest, or is what travels in the vector's tail

    @property
    def steps(self) -> int:
        return self.num_steps or self.training.steps_of(len(self.examples))

    @property
    def by_example(self) -> bool:
        """Whether its Fisher information comes from single examples."""
        return self.training.needs_examples(len(self.examples))

    @property
    def kind(self) -> Hashable:
        """Jobs of one kind go through the same steps, and can be trained together."""
        size = min(self.training.batch_size, len(self.examples))
        carries = self.momentum is not None, len(self.start)
        alone = id(self) if self.training.local == "converge" else self._steps_before
        return id(self.examples.x), size, self.steps, self.curvature, self.by_example, self.training, carries, alone

    @property
    def _steps_before(self) -> int:
        """How many steps its optimiser has made, where it counts them: what it remembers ends with that."""
        if self.training.optimizer == "sgd":
            return 0
        remembered = self.momentum if self.momentum is not None else self.start
        return int(remembered[-1].round()) if self.training.momentum_state != "fresh" and len(remembered) else 0


Trained = tuple[Gaussian, Tensor]  # a local posterior, and the momentum at its end


class Network(Protocol):
    """A network for some clients at a time."""

    at_a_time: int  # how many jobs or questions
    num_parameters: int
    length: int  # of the parameters and statistics
    likelihood: Likelihood
    template: FlatModel  # where one model at a time can be looked into, on the CPU

    def rows(self, vectors: Sequence[Tensor]) -> Tensor:
        """The vectors of jobs side by side, where the network computes."""  # (job, number)
        ...

    def training(self, jobs: Sequence[Job], means: Tensor) -> AbstractContextManager[None]:
        """Until the end the network's numbers are those of `means`, (job, vector), which training changes."""
        ...

    def gradients(self, jobs: Sequence[Job], rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Each job's gradient of its mean loss on these rows (job, example), piece by piece with its place."""
        ...

    def exact_fisher(self, jobs: Sequence[Job]) -> Tensor:
        """The mean over examples of squared gradients at the network's numbers."""  # (job, parameter)
        ...

    def log_likelihoods(self, questions: Sequence[Question]) -> list[Tensor]:
        """log p(y|x) of each chosen example under each model, in evaluation mode."""  # (model, example) each
        ...

    def outputs(self, questions: Sequence[Question]) -> list[Tensor]:
        """What each model says of the chosen examples, in evaluation mode."""  # (model, example, ...) each
        ...


def fit(network: Network, jobs: Sequence[Job]) -> list[Trained]:
    """The local posteriors p(ω|D) ∝ p(D|ω) prior(ω) in Laplace's approximation, and the momenta at their ends.

    SGD from each start minimises mean NLL + (1/N)·½ Σ precision·(θ − mean)²; the posterior precision is the prior's
    plus N · diagonal Fisher (section 3.1). Without `curvature` the precision is N everywhere: fusing such
    posteriors is averaging by examples. The statistics' precision is N too, whatever the prior's.
    """
    alike: dict[Hashable, list[int]] = {}
    for place, job in enumerate(jobs):
        alike.setdefault(job.kind, []).append(place)
    found: dict[int, Trained] = {}
    for places in alike.values():
        found |= zip(places, _fit_alike(network, [jobs[place] for place in places]), strict=True)
    return [found[place] for place in range(len(jobs))]


def _fit_alike(network: Network, jobs: Sequence[Job]) -> list[Trained]:
    """The same for jobs of one kind, which go through their steps side by side.

    The quadratic term is applied as a proximal (implicit) step, θ ← θ + w(mean − θ) with w = a/(1+a) and
    a = lr/(1−momentum) · precision/N, where momentum is fresh lr·(1−momentumᵗ)/(1−momentum) · precision/N in step t.
    It has the same fixed point as the gradient step, and stays stable however strong the prior is: an explicit step
    would blow up once lr · precision/N exceeds a few units.
    """
    job, num_parameters = jobs[0], network.num_parameters
    training, means = job.training, network.rows([job.start for job in jobs]).clone()
    theta, carried = means[:, :num_parameters], means[:, network.length :]
    num_carried = training.num_carried(num_parameters)
    velocity = carried if carried.shape[1] else theta.new_zeros(len(jobs), num_carried)
    if job.momentum is not None:
        velocity.copy_(network.rows([job.momentum for job in jobs if job.momentum is not None]))
    prior_mean, precision = (
        network.rows([values[:num_parameters] for values in of_jobs])
        for of_jobs in zip(*((job.prior.mean, job.prior.precision) for job in jobs), strict=True)
    )
    by_batches = job.curvature and not job.by_example and training.local != "converge"
    fisher = torch.zeros_like(theta) if by_batches else None
    drawn = [batches(len(job.examples), training.batch_size, job.steps, job.generator) for job in jobs]

    steps = _Steps(network, jobs, theta, velocity, prior_mean, precision, fisher)
    with network.training(jobs, means):
        if training.local == "converge":
            converged(network, job, means)
        elif training.is_plain:
            steps.plain(torch.stack(drawn, 1))
        else:
            steps.by_choice(torch.stack(drawn, 1))
        if job.curvature and fisher is None:
            fisher = network.exact_fisher(jobs)
    copy = len(jobs) > 1  # so that each answer, which may be kept for long, has its memory to itself
    found = []
    for i, job in enumerate(jobs):
        mean, momentum = means[i].to("cpu", copy=copy), velocity[i].to("cpu", copy=copy)
        found.append((_posterior(job, mean, None if fisher is None else fisher[i].cpu()), momentum))
    return found


@dataclass
class _Steps:
    """The steps of jobs that go side by side; all tensors are (job, number) and change in place."""

    network: Network
    jobs: Sequence[Job]
    theta: Tensor
    velocity: Tensor
    prior_mean: Tensor
    precision: Tensor
    fisher: Tensor | None

    def plain(self, drawn: Tensor) -> None:
        """By SGD with momentum, part of the vector by part."""  # (step, job, example)
        training, theta, velocity = self.jobs[0].training, self.theta, self.velocity
        full_pull = proximal_pull(self.precision, [len(job.examples) for job in self.jobs], training)
        for step, rows in enumerate(drawn, 1):
            pull = pull_in_step(step, full_pull, training)
            for part, gradient in self.network.gradients(self.jobs, rows):
                self._note(part, gradient, rows)
                _descend(theta[:, part], velocity[:, part], gradient, training)
                if pull is not None:
                    theta[:, part].lerp_(self.prior_mean[:, part], pull[:, part])

    def by_choice(self, drawn: Tensor) -> None:
        """By the optimiser and the schedule that the settings name."""
        training, counts = self.jobs[0].training, examples_of(self.jobs, self.theta)
        descent, gradient = Descent(self.network, training, self.theta, self.velocity), torch.zeros_like(self.theta)
        has_prior = bool(distinct(self.precision).max() > 0)
        for step, rows in enumerate(drawn, 1):
            for part, piece in self.network.gradients(self.jobs, rows):
                self._note(part, piece, rows)
                gradient[:, part] = piece
            factor = factor_in_step(training.schedule, step, len(drawn))
            descent.go(gradient, factor)
            if has_prior:
                self.theta.lerp_(self.prior_mean, descent.pull(self.precision, counts, factor))

    def _note(self, part: slice, gradient: Tensor, rows: Tensor) -> None:
        if self.fisher is not None:
            self.fisher[:, part].addcmul_(gradient, gradient, value=rows.shape[1] / self.jobs[0].steps)


def _posterior(job: Job, mean: Tensor, fisher: Tensor | None) -> Gaussian:
    num_examples = len(job.examples)
    if fisher is None:
        return even(mean, float(num_examples))
    precision = torch.full_like(mean, num_examples)
    torch.add(job.prior.precision[: len(fisher)], fisher, alpha=num_examples, out=precision[: len(fisher)])
    return Gaussian(mean, precision)


def _descend(theta: Tensor, velocity: Tensor, gradient: Tensor, training: Training) -> None:
    """velocity ← momentum · velocity + gradient, theta ← theta − learning rate · velocity, both in place."""
    # In one pass, the kernel of SGD(fused=True), where that pays. It rounds as the three operations do, except for
    # the numbers left over when its vectors are full: a length without such has the same bits (tests/client).
    count = theta.numel()
    if count >= LARGE and count % 64 == 0 and training.momentum > 0 and len(theta) == 1:
        torch._fused_sgd_(
            [theta], [gradient], [velocity], lr=training.learning_rate, momentum=training.momentum, dampening=0.0,
            weight_decay=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
        return
    theta.sub_(velocity.mul_(training.momentum).add_(gradient), alpha=training.learning_rate)


def proximal_pull(precision: Tensor, num_examples: Sequence[int], training: Training) -> Tensor | None:
    """The weights w of the proximal step towards the prior's mean; None for flat priors."""  # (job, parameter)
    if not bool(distinct(precision).max() > 0):  # any() would take five times as long
        return None
    scale = training.learning_rate / (1 - training.momentum)
    pull = torch.empty_like(precision, memory_format=torch.contiguous_format)
    for row, of_job, count in zip(pull, precision, num_examples, strict=True):
        for part, known in blocks(row, of_job):  # 1/(1 + 1/a) is a/(1+a), also where the precision is 0 or infinite
            torch.mul(known, scale / count, out=part).reciprocal_().add_(1).reciprocal_()
    return pull


def pull_in_step(step: int, pull: Tensor | None, training: Training) -> Tensor | None:
    """The weights w of the proximal step, in the t-th step: less in the first ones of a training with fresh momentum.

    The gradient has not come to its full rate lr/(1−momentum) there, but to the part c = 1 − momentumᵗ of it; with the
    full pull a prior would count more than twice in ten steps. From w = a/(1+a), that of c·a is c·w/(1 − (1−c)·w).
    """
    if pull is None or training.momentum_state != "fresh":
        return pull
    part = 1 - training.momentum**step
    return part * pull / (1 - (1 - part) * pull)


class Alone:
    """The network of one client at a time: the module itself, whose numbers are where the job's are."""

    at_a_time = 1

    def __init__(self, model: FlatModel):
        self.model = self.template = model
        self.num_parameters, self.length = model.num_parameters, len(model.vector)
        self.likelihood = model.likelihood

    def rows(self, vectors: Sequence[Tensor]) -> Tensor:
        return vectors[0][None]

    @contextmanager
    def training(self, jobs: Sequence[Job], means: Tensor) -> Iterator[None]:
        with self.model.living_in(means[0]):
            self.model.seed(jobs[0].generator)
            self.model.module.train()
            yield

    def gradients(self, jobs: Sequence[Job], rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        x, y = jobs[0].examples.batch(rows[0])
        for part, gradient in self.model.gradients(mean_loss(self.likelihood, self.model.module(x), y)):
            yield part, gradient[None]

    def exact_fisher(self, jobs: Sequence[Job]) -> Tensor:
        rows = fisher_rows(jobs[0])
        return exact_fisher(self.model, jobs[0].examples, rows, closed=jobs[0].training.closed_form)[None]

    def log_likelihoods(self, questions: Sequence[Question]) -> list[Tensor]:
        return [log_likelihoods(self.model, q.vectors, q.examples, q.rows) for q in questions]

    def outputs(self, questions: Sequence[Question]) -> list[Tensor]:
        return [outputs(self.model, q.vectors, q.examples, q.rows) for q in questions]


def alone(factory: ModelFactory, seed: int) -> Alone:
    """A network of its own for each worker; all are built alike."""
    return Alone(FlatModel(build(factory, seed, "probe")))


def fisher_rows(job: Job) -> Tensor:
    """The examples that a job's exact Fisher information is taken from."""
    return torch.randperm(len(job.examples), generator=job.generator)[: job.training.fisher_examples]
