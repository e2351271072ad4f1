"""From what the clients counted to the numbers people read."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bcfl.local import Evaluation


def macro_f1(confusion: Tensor) -> float:
    """The mean F1 over the classes that occur among the true or the predicted labels."""
    hits = confusion.diagonal().double()
    either = confusion.sum(0) + confusion.sum(1)  # true + predicted examples of the class
    seen = either > 0
    return float((2 * hits[seen] / either[seen]).mean())


def calibration_error(calibration: Tensor) -> float:
    """Expected calibration error: |confidence − accuracy| of each bin, averaged by its examples."""
    count, confidence, correct = calibration.T
    return float((confidence - correct).abs().sum() / count.sum())


def summarise(evaluations: Sequence[Evaluation | None]) -> dict[str, Any]:
    """All clients' test results: micro accuracy, macro F1 (per client, averaged by examples), NLL, Brier score, ECE."""
    tested = [evaluation for evaluation in evaluations if evaluation is not None]
    if not tested:
        return {}
    sizes = torch.tensor([int(e.confusion.sum()) for e in tested], dtype=torch.float64)
    hits = torch.tensor([int(e.confusion.diagonal().sum()) for e in tested], dtype=torch.float64)
    f1 = torch.tensor([macro_f1(e.confusion) for e in tested], dtype=torch.float64)
    calibration = torch.stack([e.calibration for e in tested]).sum(0)
    return {
        "accuracy": float(hits.sum() / sizes.sum()),
        "macro_f1": float((f1 * sizes).sum() / sizes.sum()),
        "nll": -sum(e.log_likelihood for e in tested) / float(sizes.sum()),
        "ece": calibration_error(calibration),
        "brier": sum(e.brier for e in tested) / float(sizes.sum()),
        "client_accuracy": [
            None if e is None else float(e.confusion.diagonal().sum() / e.confusion.sum()) for e in evaluations
        ],
        "calibration": calibration.tolist(),
    }


def agreement(assignment: Tensor, group: Tensor) -> float:
    """The adjusted Rand index between the assignment and the true groups: 1 when equal, about 0 when unrelated.

    Clients that were never associated (−1) do not count, unless there are no others.
    """
    from sklearn.metrics import adjusted_rand_score  # takes a second to import, and only a server needs it

    placed = assignment >= 0 if bool((assignment >= 0).any()) else torch.ones_like(assignment, dtype=torch.bool)
    return float(adjusted_rand_score(group[placed].numpy(), assignment[placed].numpy()))
