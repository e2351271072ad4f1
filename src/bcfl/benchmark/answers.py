"""What a contestant says of a site's held-out rows, and what is measured of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bcfl.benchmark.measures import Floats, expected_calibration_error
from bcfl.benchmark.tasks import Task
from bcfl.likelihood import likelihood_of

INTERVAL = 0.9  # of the central intervals whose coverage is told


@dataclass(frozen=True)
class Answer:
    """What is stated of one site's held-out rows."""

    log_prob: Floats  # (row,) of what came
    point: Floats  # (row,) the mean, or the probability of yes; (row, class) of each class
    below: Floats | None = None  # (row,) the probability of no more than what came, for real values and times


def answer_of(parts: Sequence[tuple[float, nn.Module]], x: Tensor, y: Tensor) -> Answer:
    """What a mixture of networks, each with its share, states of these rows by their likelihood."""
    share = torch.tensor([share for share, _ in parts], dtype=torch.float64)
    answers = [_stated(module, x, y) for _, module in parts]
    log_prob, point, below = (
        None if found[0] is None else torch.stack([one.double() for one in found if one is not None])
        for found in zip(*answers, strict=True)
    )
    assert log_prob is not None
    assert point is not None
    return Answer(
        (log_prob + share.log()[:, None]).logsumexp(0).numpy(),
        torch.tensordot(share, point, 1).numpy(),
        None if below is None else (share @ below).numpy(),
    )


def _stated(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """log p of what came, the mean, and the probability of no more, by one network."""
    likelihood = likelihood_of(module)
    with torch.no_grad():
        output = module(x)
        distribution = None if likelihood.family.discrete else likelihood.distribution(output)
        below = None if distribution is None else distribution.cdf(y if y.dim() == 1 else y[:, 0])
        return likelihood.log_prob(output, y), likelihood.mean(output), below


def nll_of(answer: Answer) -> float:
    return float(-answer.log_prob.mean())


def measure_of(task: Task, answer: Answer, y: Floats) -> float | None:
    """The task's own measure at one site; None where it has none, as the concordance of a single row."""
    if task.kind == "real":
        return float(np.sqrt(np.square(answer.point - y).mean()))
    if task.kind == "time":
        return concordance(answer.point, y[:, 0], y[:, 1])
    predicted = answer.point.argmax(1) if answer.point.ndim == 2 else answer.point > 0.5
    return float((predicted == y).mean())


def concordance(stated: Floats, time: Floats, event: Floats) -> float | None:
    """Harrell's: of pairs whose order is known, the share that was stated in that order; ties count half."""
    known = (event[:, None] == 1) & ((time[:, None] < time) | ((time[:, None] == time) & (event == 0)))
    np.fill_diagonal(known, False)
    if not known.any():
        return None
    right = (stated[:, None] < stated) + 0.5 * (stated[:, None] == stated)
    return float(right[known].mean())


def calibration_of(task: Task, answers: Sequence[Answer], y: Sequence[Floats]) -> dict[str, Any]:
    """How honest the stated probabilities are, over all rows.

    Real values: how often the central 90 % interval holds them. Times: how many ends are stated up to where each was
    last seen, for each that came. Else the expected calibration error.
    """
    came = np.concatenate(y)
    if task.kind in ("real", "time"):
        if any(answer.below is None for answer in answers):
            return {}
        below = np.concatenate([answer.below for answer in answers if answer.below is not None])
        if task.kind == "real":
            half = (1 - INTERVAL) / 2
            return {"coverage90": float(((below >= half) & (below <= 1 - half)).mean())}
        return {"ends_stated_for_each": float(-np.log1p(-below.clip(0, 1 - 1e-9)).sum() / came[:, 1].sum())}
    point = np.concatenate([answer.point for answer in answers])
    stated = point if point.ndim == 2 else np.stack([1 - point, point], 1)
    right = (stated.argmax(1) == came).astype(np.float64)
    return {"ece": expected_calibration_error(stated.max(1), right)}
