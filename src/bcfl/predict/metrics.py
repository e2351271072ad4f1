"""From what the clients counted to the numbers people read."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bcfl.client.score import Evaluation


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


SETTLING = 5  # rounds at the beginning that are not rest yet: models and groups are still being found


def with_own_group(assignment: Tensor, group: Tensor) -> Tensor:
    """Whether each client is, in each round, in the cluster where most of its group are: whatever that is called.

    Both are (round, client). Where a group has members that never change it, they alone say where it is; at a draw it
    is in the cluster with the smaller number. A client that was never associated (−1) is nowhere.
    """
    constant = (group == group[0]).all(0)
    home = torch.full_like(assignment, -1)
    for t, (clusters, groups) in enumerate(zip(assignment, group, strict=True)):
        for own in groups.unique().tolist():
            members = (groups == own) & (clusters >= 0)
            members = members & constant if (members & constant).any() else members
            if members.any():
                home[t, groups == own] = torch.bincount(clusters[members]).argmax()
    return (assignment == home) & (assignment >= 0)  # (round, client)


def false_switches(assignment: Tensor, group: Tensor, settling: int = SETTLING) -> float | None:
    """How often a client at rest leaves its group, per client and round: None if nobody ever was at rest.

    At rest is who was with its group in the round before and whose group has not changed since; the first `settling`
    rounds do not count.
    """
    right = with_own_group(assignment, group)
    first = max(settling, 1)  # as an index: the first round that counts
    rest = right[first - 1 : -1] & (group[first:] == group[first - 1 : -1])
    left = ~right[first:]
    return int((rest & left).sum()) / int(rest.sum()) if rest.any() else None


def rounds_until_associated(assignment: Tensor, group: Tensor) -> dict[int, int | None]:
    """For each client whose true group changes, in how many rounds it is first found with its new group.

    1: in the very round in which its data changed; None: not within the run.
    """
    right, found = with_own_group(assignment, group), {}
    for client in (group != group[0]).any(0).nonzero()[:, 0].tolist():
        change = int((group[:, client] != group[0, client]).nonzero()[0])
        there = right[change:, client].nonzero()
        found[client] = int(there[0]) + 1 if len(there) else None
    return found


def follow_drift(assignment: Tensor, group: Tensor) -> dict[str, Any] | None:
    """What there is to say of a run, both (round, client), in which true groups change; None where none does.

    None, too, where clients were never told apart, or all of them always: nobody could be lost or found. The median
    counts those that were never found as later than all others; it is None if they are the most.
    """
    found = rounds_until_associated(assignment, group)
    num_clusters = [len(clusters[clusters >= 0].unique()) for clusters in assignment]
    if not found or max(num_clusters) <= 1 or min(num_clusters) == assignment.shape[1] > 2:
        return None
    median = statistics.median([math.inf if count is None else count for count in found.values()])
    return {
        "false_switches": false_switches(assignment, group),
        "changed": len(found),
        "found_again": sum(count is not None for count in found.values()),
        "rounds_until_found": median if math.isfinite(median) else None,
    }
