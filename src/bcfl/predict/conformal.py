"""Prediction sets and intervals that hold the truth as often as they say, whatever the model: split conformal.

A known site keeps some labelled rows aside. They must have had no part in training or in the site's membership; then
a new row of the site is exchangeable with them, and its nonconformity is among theirs at a random place. With n such
rows the ⌈(n + 1)(1 − α)⌉-th smallest of theirs covers a new row with probability 1 − α at least, and with at most
1/(n + 1) more where no two are equal: for this site by itself, not on average over sites. With fewer than 1/α − 1 rows
nothing short of everything is sure, and that is what is given then.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bcfl.randomness import generator


def least_rows(alpha: float) -> int:
    """How many rows are needed for sets that leave out anything at all: 1/α − 1."""
    _check(alpha)
    return math.ceil((1 - alpha) / alpha - 1e-9)


def conformal_quantile(nonconformity: Tensor, alpha: float) -> float:
    """The ⌈(n + 1)(1 − α)⌉-th smallest; ∞ where there are too few rows to promise anything."""
    _check(alpha)
    count = len(nonconformity)
    rank = math.ceil((count + 1) * (1 - alpha) - 1e-9)  # of 0.9 · 10 in floating point: 9, not 10
    if nonconformity.dim() != 1 or bool(nonconformity.isnan().any()):
        raise ValueError(f"nonconformity must be a row of numbers, got {tuple(nonconformity.shape)}, or NaN among them")
    return math.inf if rank > count else float(nonconformity.double().sort().values[rank - 1])


def _check(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be above 0 and below 1, got {alpha}")


@dataclass(frozen=True)
class PredictionSets:
    """Of each row the classes that may be its own, one of them with probability 1 − alpha."""

    holds: Tensor  # (example, class) bool
    alpha: float
    num_rows: int  # by which they were calibrated
    quantile: float

    @property
    def sets(self) -> list[list[int]]:
        """The classes of each row, as numbers."""
        return [row.nonzero()[:, 0].tolist() for row in self.holds]

    @property
    def says_something(self) -> bool:
        """Whether there were rows enough to leave out anything."""
        return math.isfinite(self.quantile)

    def covers(self, y: Tensor) -> Tensor:
        """Whether each row's set holds its label."""  # (example,) bool
        return self.holds.gather(1, y.long()[:, None])[:, 0]


@dataclass(frozen=True)
class Intervals:
    """Of each row an interval that holds its value with probability 1 − alpha."""

    low: Tensor  # (example,)
    high: Tensor
    alpha: float
    num_rows: int
    quantile: float

    @property
    def says_something(self) -> bool:
        """Whether there were rows enough for an interval that ends."""
        return math.isfinite(self.quantile)

    def covers(self, y: Tensor) -> Tensor:
        """Whether each row's interval holds its value."""  # (example,) bool
        return (self.low <= y) & (y <= self.high)


def prediction_sets(probability: Tensor, y: Tensor, new: Tensor, alpha: float) -> PredictionSets:
    """The classes whose probability is not below what rows kept aside show: 1 − p(class) is the nonconformity.

    `probability` (row, class) and `y` (row,) are of the rows kept aside, `new` (example, class) of those asked about.
    """
    rows = 1 - probability.double().gather(1, y.long()[:, None])[:, 0]
    quantile = conformal_quantile(rows, alpha)
    return PredictionSets(1 - new.double() <= quantile, alpha, len(y), quantile)


def prediction_intervals(
    centre: Tensor,
    y: Tensor,
    new: Tensor,
    alpha: float,
    *,
    scale: Tensor | None = None,
    new_scale: Tensor | None = None,
) -> Intervals:
    """Each row's predicted value ± what rows kept aside show: |y − centre| / scale is the nonconformity."""
    unit = torch.ones_like(centre, dtype=torch.float64) if scale is None else scale.double()
    new_unit = torch.ones_like(new, dtype=torch.float64) if new_scale is None else new_scale.double()
    quantile = conformal_quantile((y.double() - centre.double()).abs() / unit, alpha)
    reach = quantile * new_unit
    return Intervals(new.double() - reach, new.double() + reach, alpha, len(y), quantile)


def keep_aside(clients: Iterable[Any], share: float, seed: int = 0) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Clients for training, each without a random `share` of its rows, and those rows (x, y) for calibration.

    What a client has for testing stays with it. Each keeps at least one row on either side.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must be above 0 and below 1, got {share}")
    left, aside = [], []
    for number, (x, y, *tested) in enumerate(clients):
        if len(y) < 2:
            raise ValueError(f"client {number}: of one row none can be kept aside")
        order = torch.randperm(len(y), generator=generator(seed, "kept aside", number)).numpy()
        count = min(max(round(share * len(y)), 1), len(y) - 1)
        aside.append((x[order[:count]], y[order[:count]]))
        left.append((x[order[count:]], y[order[count:]], *tested))
    return left, aside
