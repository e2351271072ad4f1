"""Local training by another optimiser than plain SGD, or until it converges.

The prior's quadratic term is a proximal step here too, in the metric of the optimiser: where that divides a gradient by
its size, it divides the pull by the same. So the fixed point is that of the objective, whatever optimiser goes there.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from bcfl.client.score import Question

if TYPE_CHECKING:
    from bcfl.client.trainer import Job, Network, Training

# The tensors of each optimiser's state, the last one being what it divides gradients by; then comes a count of steps.
STATES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "adam": (torch.optim.Adam, ("exp_avg", "exp_avg_sq")),
    "adamw": (torch.optim.Adam, ("exp_avg", "exp_avg_sq")),  # its decay is done here, for the numbers that are to decay
    "adamax": (torch.optim.Adamax, ("exp_avg", "exp_inf")),
    "rmsprop": (torch.optim.RMSprop, ("square_avg",)),
    "adagrad": (torch.optim.Adagrad, ("sum",)),
}
TOLERANCE = 1e-5  # of the largest slope of the objective per example, where training goes on until it converges


def num_carried(optimizer: str, num_parameters: int) -> int:
    """How many numbers an optimiser's state has."""
    return num_parameters if optimizer == "sgd" else len(STATES[optimizer][1]) * num_parameters + 1


def factor_in_step(schedule: str, step: int, num_steps: int) -> float:
    """What the learning rate is multiplied with in the t-th step of a training."""
    done = (step - 1) / num_steps
    if schedule == "linear":
        return 1 - done
    return 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0


class Descent:
    """One optimiser for the numbers of several jobs at once, whose states are the rows of a tensor."""

    def __init__(self, network: "Network", training: "Training", theta: Tensor, state: Tensor):
        self.training, self.theta, self.state = training, theta, state  # (job, parameter), (job, number)
        decays = ~network.template.frozen.to(theta.device)
        decays[: network.likelihood.num_unknowns] = False
        self._decay = training.weight_decay * decays
        self._step = 0
        if training.optimizer == "sgd":
            return
        kind, self._names = STATES[training.optimizer]
        self._parameter = torch.nn.Parameter(theta)
        self._optimizer = kind([self._parameter], lr=training.learning_rate)
        count = theta.shape[1]
        parts = {name: state[:, i * count : (i + 1) * count] for i, name in enumerate(self._names)}
        parts[self._names[-1]].clamp_(min=0)  # as averages over clients leave it, but noise for privacy may not
        self._step = int(state[0, -1].round())
        self._optimizer.state[self._parameter] = {"step": torch.tensor(float(self._step)), **parts}

    def go(self, gradient: Tensor, factor: float) -> None:
        """One step along the gradients."""  # (job, parameter)
        training, rate = self.training, self.training.learning_rate * factor
        if training.clip is not None:
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (training.clip / norm.clamp(min=training.clip))
        if training.weight_decay and training.optimizer == "adamw":
            self.theta.mul_(1 - rate * self._decay)
        elif training.weight_decay:
            gradient = gradient + self._decay * self.theta
        self._step += 1
        if training.optimizer == "sgd":
            self.theta.sub_(self.state.mul_(training.momentum).add_(gradient), alpha=rate)
            return
        self._parameter.grad = gradient
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self.state[:, -1] = self._step

    def pull(self, precision: Tensor, num_examples: Tensor, factor: float) -> Tensor:
        """The weights of the proximal step that goes with the last one: a/(1 + a), a = rate · precision/N."""
        rate = self._rate(factor)
        return 1 / (1 + num_examples[:, None] / (rate * precision))

    def _rate(self, factor: float) -> Tensor | float:
        """How far a lasting gradient of 1 moves a number in a step."""
        training = self.training
        rate = training.learning_rate * factor
        if training.optimizer == "sgd":
            part = 1 - training.momentum**self._step if training.momentum_state == "fresh" else 1.0
            return rate * part / (1 - training.momentum)
        size: Tensor = self._optimizer.state[self._parameter][self._names[-1]]
        if training.optimizer in ("adam", "adamw"):
            size = size / (1 - 0.999**self._step)
        return rate / ((size if training.optimizer == "adamax" else size.sqrt()) + 1e-8)


def converged(network: "Network", job: "Job", means: Tensor) -> None:
    """The job's numbers are where its objective is least, to `TOLERANCE` or after so many iterations: by L-BFGS.

    All examples are taken at once. For small models without dropout and BatchNorm.
    """
    count, num_examples = network.num_parameters, len(job.examples)
    mean, precision = (network.rows([values[:count]])[0].double() for values in (job.prior.mean, job.prior.precision))
    fixed, rows = precision.isinf(), torch.arange(num_examples)
    weight = torch.where(fixed, 0.0, precision) / num_examples
    theta = means[0, :count]
    theta.copy_(torch.where(fixed, mean, theta.double()))

    def objective(at: Any) -> tuple[float, Any]:
        theta.copy_(torch.from_numpy(at))
        (log_p,) = network.log_likelihoods([Question([means[0, : network.length].cpu().clone()], job.examples, rows)])
        slope = torch.zeros(count, dtype=torch.float64, device=theta.device)
        for part, piece in network.gradients([job], rows[None]):
            slope[part] = piece[0].double()
        apart = theta.double() - mean
        slope = torch.where(fixed, 0.0, slope + weight * apart)
        value = -float(log_p.double().mean()) + 0.5 * float((weight * apart.square()).sum())
        return value, slope.cpu().numpy()

    start = theta.double().cpu().numpy().astype(np.float64)
    options: Any = {"maxiter": job.steps, "gtol": TOLERANCE, "ftol": 1e-12}
    found = scipy.optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    theta.copy_(torch.from_numpy(found.x))


def examples_of(jobs: Sequence["Job"], like: Tensor) -> Tensor:
    """How many examples each job has."""  # (job,)
    return torch.tensor([float(len(job.examples)) for job in jobs], device=like.device)
