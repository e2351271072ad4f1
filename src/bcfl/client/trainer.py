"""What a client does with its own data: train from a prior, score models, evaluate a model.

All of it runs in one thread on one FlatModel and is a function of its arguments: the same call gives the same bits
in any worker. Only `take_statistics` changes a module, which is its caller's.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from bcfl.belief.gaussian import Gaussian, blocks, distinct
from bcfl.client.examples import Examples, batches
from bcfl.client.fisher import exact_fisher
from bcfl.client.score import log_likelihoods, log_probabilities
from bcfl.model.flat import LARGE, FlatModel

__all__ = ["Training", "fit", "log_likelihoods", "log_probabilities"]


@dataclass(frozen=True)
class Training:
    """How clients train: the same for every method."""

    learning_rate: Annotated[float, Field(gt=0, le=1e30, description="of SGD; the paper's runs have 0.005")] = 0.05
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


def fit(
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
    """The local posterior p(ω|D) ∝ p(D|ω) prior(ω) in Laplace's approximation, and the momentum at its end.

    SGD from `start` minimises mean NLL + (1/N)·½ Σ precision·(θ − mean)²; the posterior precision is the prior's plus
    N · diagonal Fisher (eq. fed_posterior). Without `curvature` the precision is N everywhere: fusing such posteriors
    is averaging by examples. The statistics' precision is N too, whatever the prior's.

    The quadratic term is applied as a proximal (implicit) step, θ ← θ + w(mean − θ) with w = a/(1+a) and
    a = lr/(1−momentum) · precision/N, where momentum is fresh lr·(1−momentumᵗ)/(1−momentum) · precision/N in step t.
    It has the same fixed point as the gradient step, and stays stable however strong the prior is: an explicit step
    would blow up once lr · precision/N exceeds a few units.
    """
    num_parameters, num_examples = model.num_parameters, len(examples)
    num_steps = num_steps or training.local_steps
    mean = start.clone()  # where the model lives from here on, and in the end the posterior's
    carried = mean[len(model.vector) :]  # empty unless momentum travels along
    velocity = carried if len(carried) else torch.zeros(num_parameters)
    if momentum is not None:
        velocity.copy_(momentum)
    prior_mean = prior.mean[:num_parameters]
    full_pull = proximal_pull(prior.precision[:num_parameters], num_examples, training)
    by_batches = curvature and not needs_exact_fisher(training, num_examples)
    fisher = torch.zeros(num_parameters) if by_batches else None

    with model.living_in(mean):
        model.seed(generator)
        model.module.train()
        for step, rows in enumerate(batches(num_examples, training.batch_size, num_steps, generator), 1):
            pull = pull_in_step(step, full_pull, training)
            x, y = examples.batch(rows)
            for part, gradient in model.gradients(F.cross_entropy(model.module(x), y)):
                if fisher is not None:
                    fisher[part].addcmul_(gradient, gradient, value=len(rows) / num_steps)
                _descend(mean[part], velocity[part], gradient, training)
                if pull is not None:
                    mean[part].lerp_(prior_mean[part], pull[part])
        if curvature and fisher is None:
            rows = torch.randperm(num_examples, generator=generator)[: training.fisher_examples]
            fisher = exact_fisher(model, examples, rows, closed=has_closed_fisher(training))

    if fisher is None:
        return Gaussian(mean, torch.tensor(float(num_examples)).expand(len(mean))), velocity
    precision = torch.full_like(mean, num_examples)
    torch.add(prior.precision[:num_parameters], fisher, alpha=num_examples, out=precision[:num_parameters])
    return Gaussian(mean, precision), velocity


def _descend(theta: Tensor, velocity: Tensor, gradient: Tensor, training: Training) -> None:
    """velocity ← momentum · velocity + gradient, theta ← theta − learning rate · velocity, both in place."""
    # In one pass, the kernel of SGD(fused=True), where that pays. It rounds as the three operations do, except for
    # the numbers left over when its vectors are full: a length without such has the same bits (tests/test_local.py).
    if len(theta) >= LARGE and len(theta) % 64 == 0 and training.momentum > 0:
        torch._fused_sgd_(
            [theta], [gradient], [velocity], lr=training.learning_rate, momentum=training.momentum, dampening=0.0,
            weight_decay=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
        return
    theta.sub_(velocity.mul_(training.momentum).add_(gradient), alpha=training.learning_rate)


def proximal_pull(precision: Tensor, num_examples: int | Tensor, training: Training) -> Tensor | None:
    """The weights w of the proximal step towards the prior's mean; None for a flat prior."""
    if not bool(distinct(precision).max() > 0):  # any() would take five times as long
        return None
    scale = training.learning_rate / (1 - training.momentum) / num_examples
    pull = torch.empty_like(precision, memory_format=torch.contiguous_format)
    for part, known in blocks(pull, precision):  # 1/(1 + 1/a) is a/(1+a), also where the precision is 0 or infinite
        torch.mul(known, scale, out=part).reciprocal_().add_(1).reciprocal_()
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


def needs_exact_fisher(training: Training, num_examples: int) -> bool:
    """Whether the Fisher information must come from single examples, by the settings or for want of examples.

    A batch of all examples shows no scatter: its mean gradient vanishes at the optimum, and their squares do not.
    """
    return training.fisher in ("exact", "examples") or num_examples <= training.batch_size


def has_closed_fisher(training: Training) -> bool:
    """Whether single examples' gradients are squared and summed layer by layer, where that can be done."""
    return training.fisher in ("auto", "examples")
