"""From what the clients counted to the numbers people read."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import scipy.special
import torch
from torch import Tensor

from bcfl.likelihood import CATEGORICAL, Likelihood
from bcfl.likelihood.measures import LEADS, Evaluation

Z = 1.959964  # two-sided 95 %
FROM_SUMS: dict[str, tuple[str, Callable[[float], float]]] = {  # measure -> the sum that it is made of, and how
    "accuracy": ("correct", float),
    "brier": ("brier", float),
    "rmse": ("squared_error", math.sqrt),
    "mae": ("absolute_error", float),
    "crps": ("crps", float),
    "coverage_50": ("within_50", float),
    "coverage_90": ("within_90", float),
    "deviance": ("deviance", float),
}
SHARES = ("accuracy", "coverage_50", "coverage_90")
MORE_IS_BETTER = ("accuracy", "macro_f1", "auc", "sensitivity", "r2", "concordance", "mean_iou", "coverage_50",
                  "coverage_90")  # fmt: skip


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


def summarise(evaluations: Sequence[Evaluation | None], likelihood: Likelihood = CATEGORICAL) -> dict[str, Any]:
    """All clients' test results by the measures that suit the kind of target; nothing, if nobody is tested.

    Under its plain name each measure over all test examples: of ratios and sums that of the examples together, of
    others (macro F1, AUC, R², concordance …) the mean over clients by examples. `client_…` has each client's, with null
    for one without, `client_interval` its 95 % intervals, and `over_clients` mean, worst, spread and interval of them.
    """
    tested = [evaluation for evaluation in evaluations if evaluation is not None]
    if not tested:
        return {}
    kind = likelihood.family.kind
    of_client = [None if e is None else measures_of(e, kind) for e in evaluations]
    known = [found for found in of_client if found is not None]
    lead, more_is_better = LEADS[kind]
    record = together(tested, kind)
    for name in known[0]:
        record[f"client_{name}"] = [None if found is None else _plain(found[name].value) for found in of_client]
    record["client_examples"] = [None if e is None else e.num_examples for e in evaluations]
    record["client_interval"] = {
        name: [None if found is None else found[name].interval for found in of_client] for name in known[0]
    }
    record["over_clients"] = {
        name: over_clients([found[name].value for found in known], _more_is_better(name)) for name in known[0]
    }
    record["lead"] = {"measure": lead, "more_is_better": more_is_better}
    return record


@dataclass(frozen=True)
class Measure:
    """A client's measure: its value, and where it may lie with 95 %."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def interval(self) -> list[float] | None:
        return [_short(self.low), _short(self.high)] if math.isfinite(self.low + self.high) else None


def together(tested: Sequence[Evaluation], kind: str) -> dict[str, Any]:
    """The measures over all clients' test examples."""
    sizes = torch.tensor([e.num_examples for e in tested], dtype=torch.float64)
    total = float(sizes.sum())
    found: dict[str, Any] = {}
    if kind == "classes":
        hits = torch.tensor([int(e.confusion.diagonal().sum()) for e in tested], dtype=torch.float64)
        f1 = torch.tensor([macro_f1(e.confusion) for e in tested], dtype=torch.float64)
        found = {"accuracy": float(hits.sum() / sizes.sum()), "macro_f1": float((f1 * sizes).sum() / sizes.sum())}
    found["nll"] = -sum(e.log_likelihood for e in tested) / total
    if "calibration" in tested[0].tables:
        calibration = torch.stack([e.calibration for e in tested]).sum(0)
        found |= {"ece": calibration_error(calibration), "calibration": calibration.tolist()}
    for name, (of, finish) in FROM_SUMS.items():
        if of in tested[0].sums and name not in found:
            found[name] = finish(sum(e.sums[of][0] for e in tested) / total)
    if kind == "tokens":
        found["perplexity"] = _exp(found["nll"])
    if kind == "pixels":
        found["mean_iou"] = mean_iou(torch.stack([e.confusion for e in tested]).sum(0))
    for name in tested[0].values:
        there = [(e.values[name][0], e.num_examples) for e in tested if not math.isnan(e.values[name][0])]
        if there:
            found[name] = sum(value * count for value, count in there) / sum(count for _, count in there)
    return found


def measures_of(evaluation: Evaluation, kind: str) -> dict[str, Measure]:
    """One client's measures, by their plain names."""
    count, found = evaluation.num_examples, {}
    if kind == "classes":
        found["accuracy"] = _share(float(evaluation.confusion.diagonal().sum() / evaluation.confusion.sum()), count)
        found["macro_f1"] = Measure(macro_f1(evaluation.confusion))
    total, squares = evaluation.sums["log_likelihood"]
    found["nll"] = _around(-total / count, squares / count, count)
    for name, (of, finish) in FROM_SUMS.items():
        if of in evaluation.sums:
            mean, square = (number / count for number in evaluation.sums[of])
            around = _share(mean, count) if name in SHARES else _around(mean, square, count)
            found[name] = Measure(finish(around.value), finish(max(around.low, 0.0)), finish(around.high))
    if kind == "tokens":
        nll = found["nll"]
        found["perplexity"] = Measure(_exp(nll.value), _exp(nll.low), _exp(nll.high))
    if kind == "pixels":
        found["mean_iou"] = Measure(mean_iou(evaluation.confusion))
    for name, (value, error) in evaluation.values.items():
        found[name] = Measure(value, max(value - Z * error, 0.0), min(value + Z * error, 1.0))
    return found


def over_clients(values: Sequence[float], more_is_better: bool) -> dict[str, Any]:
    """Mean, worst and spread (standard deviation) over clients, and a 95 % interval of the mean by Student's t."""
    there = [value for value in values if math.isfinite(value)]
    if not there:
        return {}
    mean, worst = statistics.fmean(there), (min if more_is_better else max)(there)
    spread = statistics.stdev(there) if len(there) > 1 else None
    interval = None
    if spread is not None:
        half = float(scipy.special.stdtrit(len(there) - 1, 0.975)) * spread / math.sqrt(len(there))
        interval = [_short(mean - half), _short(mean + half)]
    return {"mean": _short(mean), "worst": _short(worst), "spread": spread and _short(spread), "interval": interval}


def mean_iou(confusion: Tensor) -> float:
    """The mean over the classes that occur of what truth and prediction share, over what either has."""
    both = confusion.diagonal().double()
    either = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    return float((both / either)[either > 0].mean())


def _around(mean: float, square: float, count: int) -> Measure:
    """A mean with its interval, by the standard deviation of what it is taken over."""
    if count < 2:
        return Measure(mean)
    half = Z * math.sqrt(max(square - mean * mean, 0.0) / (count - 1))
    return Measure(mean, mean - half, mean + half)


def _share(share: float, count: int) -> Measure:
    """A share with Wilson's interval."""
    middle, half = (share + Z * Z / (2 * count)), Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count**2))
    return Measure(share, (middle - half) / (1 + Z * Z / count), (middle + half) / (1 + Z * Z / count))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _more_is_better(name: str) -> bool:
    return name in MORE_IS_BETTER


def _short(number: float) -> float:
    return float(f"{number:.5g}")


def _plain(number: float) -> float | None:
    """As JSON has it: NaN, of what cannot be told, is null."""
    return number if math.isfinite(number) else None


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
