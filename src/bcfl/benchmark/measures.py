"""What is told of numbers that sites have: means, the worst tenth, and differences with intervals over sites."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bcfl.randomness import numpy_generator

Floats = npt.NDArray[np.float64]
FEWEST = 10  # sites, for a verdict
NUM_RESAMPLES = 2000
LEVEL = 0.95


def mean(values: Sequence[float | None]) -> float | None:
    """Over the sites that have a number; None if none has."""
    known = _known(values)
    return float(known.mean()) if len(known) else None


def worst_tenth(losses: Sequence[float | None]) -> float | None:
    """The mean over the tenth of the sites with the greatest losses, one site at least."""
    known = np.sort(_known(losses))[::-1]
    return float(known[: max(1, round(len(known) / 10))].mean()) if len(known) else None


def share_that_gains(losses: Sequence[float | None], alone: Sequence[float | None]) -> float | None:
    """The share of the sites that lose less than by training alone."""
    difference = _paired(losses, alone)
    return float((difference < 0).mean()) if len(difference) else None


def _known(values: Sequence[float | None]) -> Floats:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _paired(first: Sequence[float | None], second: Sequence[float | None]) -> Floats:
    pairs = zip(first, second, strict=True)
    return np.array([a - b for a, b in pairs if a is not None and b is not None], dtype=np.float64)


@dataclass(frozen=True)
class Difference:
    """How two methods' losses differ over the same sites; below zero the first is better."""

    mean: float
    low: float
    high: float
    sites: int

    @property
    def verdict(self) -> str:
        """better, worse or open: open where the interval holds 0, or the sites are too few."""
        if self.sites < FEWEST or self.low <= 0 <= self.high:
            return "open"
        return "better" if self.high < 0 else "worse"


def difference(first: Sequence[float | None], second: Sequence[float | None]) -> Difference | None:
    """The mean paired difference with its percentile interval, by drawing the sites anew with replacement."""
    paired = _paired(first, second)
    if not len(paired):
        return None
    random = numpy_generator(0, "bootstrap", len(paired))
    drawn = paired[random.integers(len(paired), size=(NUM_RESAMPLES, len(paired)))].mean(1)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(paired.mean()), float(low), float(high), len(paired))


def interval(values: Sequence[float | None]) -> Difference | None:
    """The mean over sites with its interval."""
    return difference(values, [0.0] * len(values))


def mean_ranks(losses: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean rank of each contestant over the tasks that all of them have; 1 is best, equals share a rank."""
    from scipy.stats import rankdata

    shared = [task for task in next(iter(losses.values()), {}) if all(task in of for of in losses.values())]
    if not shared:
        return {}
    table = np.array([[of[task] for task in shared] for of in losses.values()])  # (contestant, task)
    return dict(zip(losses, rankdata(table, axis=0).mean(1).tolist(), strict=True))


def critical_difference(num_contestants: int, num_tasks: int) -> float:
    """How far two mean ranks must be apart for Nemenyi's test at 5 % (Demšar 2006)."""
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(LEVEL, num_contestants, np.inf)) / math.sqrt(2)
    return q * math.sqrt(num_contestants * (num_contestants + 1) / (6 * num_tasks))


def expected_calibration_error(confidence: Floats, right: Floats, num_bins: int = 10) -> float:
    """How far stated probabilities are from how often they come true, over bins of equal width."""
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    gaps = [abs((confidence[bins == b] - right[bins == b]).sum()) for b in range(num_bins)]
    return float(sum(gaps) / len(confidence))


def pair_calibration(membership: Floats, group: Sequence[int]) -> dict[str, float]:
    """How sure a membership is that two sites share a kind, and how often that is so: no labels of clusters needed.

    `membership` is (site, cluster). `stated` is the mean probability given to what is held likelier of each pair,
    `right` how often that is so, `nll` the log-loss of the pairs.
    """
    kinds = np.asarray(group)
    first, second = np.triu_indices(len(kinds), 1)
    together = np.clip((membership[first] * membership[second]).sum(1), 1e-9, 1 - 1e-9)
    true = kinds[first] == kinds[second]
    return {
        "stated": float(np.maximum(together, 1 - together).mean()),
        "right": float(((together > 0.5) == true).mean()),
        "nll": float(-np.where(true, np.log(together), np.log(1 - together)).mean()),
    }
