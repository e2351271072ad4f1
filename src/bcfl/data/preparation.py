"""How a table's columns become a network's inputs, agreed on by sums that sites tell and nothing else of their rows.

A site tells of each column, by its training rows alone: of numbers how many there are, their mean and the sum of their
squared deviations from it; of categories how often each occurs; and how many values are missing. Such sums add up over
sites, exactly as if all rows lay in one place.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from bcfl.data.frames import Array, Column, Columns, num_rows, wanted

RARE = 5  # a category with fewer training rows in all is merged with the other rare ones
MOST_CATEGORIES = 50  # of a column that nobody said to be of categories: beyond, it is free text or a number's name
OTHERS = "other"


@dataclass(frozen=True)
class NumberSums:
    """What a site tells of a column of numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # of the deviations from the mean, summed
    missing: int = 0

    @staticmethod
    def of(values: Array) -> "NumberSums":
        there = values[~np.isnan(values)]
        if not len(there):
            return NumberSums(missing=len(values))
        with np.errstate(over="ignore", invalid="ignore"):  # what is infinite is left out: see _number
            mean = float(there.mean())
            squares = float(np.square(there - mean).sum())
        return NumberSums(len(there), mean, squares, len(values) - len(there))

    def __add__(self, other: "NumberSums") -> "NumberSums":
        """Of both together (Chan, Golub, LeVeque 1979: no difference of large numbers is taken)."""
        count, missing = self.count + other.count, self.missing + other.missing
        if not count:
            return NumberSums(missing=missing)
        apart, share = other.mean - self.mean, other.count / count
        between = apart * apart * self.count * share
        return NumberSums(count, self.mean + apart * share, self.squares + other.squares + between, missing)


@dataclass(frozen=True)
class CategorySums:
    """What a site tells of a column of categories: how often each occurs."""

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    missing: int = 0

    @staticmethod
    def of(texts: Sequence[str | None] | Array) -> "CategorySums":
        counts = Counter(text for text in texts if text is not None)
        return CategorySums(dict(counts), len(texts) - counts.total())

    def __add__(self, other: "CategorySums") -> "CategorySums":
        return CategorySums(Counter(self.counts) + Counter(other.counts), self.missing + other.missing)


Sums = Mapping[str, NumberSums | CategorySums]  # column -> what a site, or all of them together, tell


@dataclass(frozen=True)
class Number:
    """A column of numbers, brought to mean 0 and deviation 1; where there is none, the mean, and a 1 beside it."""

    name: str
    mean: float
    deviation: float
    missing: bool  # whether some training rows had none, so that a column says where

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.name, f"{self.name} missing") if self.missing else (self.name,)

    def apply(self, column: Column) -> Array:
        """Its inputs."""  # (row, input)
        gone = np.isnan(column.values)
        scaled = np.where(gone, 0.0, (column.values - self.mean) / self.deviation)
        return np.stack([scaled, gone], 1) if self.missing else scaled[:, None]


@dataclass(frozen=True)
class Categories:
    """A column of categories, each a column of 0 and 1 but for the most frequent: where all are 0 it is that one.

    What is missing, or was never seen in training, counts as the most frequent unless it has a column of its own.
    """

    name: str
    usual: str  # the most frequent one
    categories: tuple[str, ...]  # the others that have a column each
    others: bool  # whether rare ones share a column, as do those that were never seen
    missing: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        extra = [OTHERS] * self.others + ["missing"] * self.missing
        return tuple(f"{self.name} {label}" for label in (*self.categories, *extra))

    def apply(self, column: Column) -> Array:
        """Its inputs."""  # (row, input)
        texts, known = column.texts(), {self.usual, *self.categories}
        made = [texts == category for category in self.categories]
        if self.others:
            made.append(np.array([text is not None and text not in known for text in texts], bool))
        if self.missing:
            made.append(np.array([text is None for text in texts], bool))
        return np.stack(made, 1).astype(np.float64) if made else np.empty((len(texts), 0))


Feature = Number | Categories


@dataclass(frozen=True)
class Preparation:
    """How a table's columns become inputs: the same at every site, and for rows that come later."""

    features: tuple[Feature, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """What each of the network's inputs is."""
        return tuple(name for feature in self.features for name in feature.inputs)

    def apply(self, columns: Columns, what: str = "data") -> Array:
        """The inputs of these rows."""  # (row, input) float32
        parts = [np.empty((num_rows(columns), 0), np.float32)]
        for feature in self.features:
            column = wanted(columns, feature.name, "the run was trained with", what)
            if isinstance(feature, Number) and column.values.dtype == object:
                if not bool(column.missing.all()):
                    raise ValueError(f"{what}: column {feature.name!r} must hold numbers, as it did in training, but "
                                     f"holds {column.kind}")  # fmt: skip
                column = Column("number", np.full(len(column.values), np.nan))
            if isinstance(feature, Categories) and column.kind == "dates":
                raise ValueError(f"{what}: column {feature.name!r} must hold categories, as it did in training, but "
                                 "holds dates")  # fmt: skip
            with np.errstate(over="ignore", invalid="ignore"):
                made = feature.apply(column).astype(np.float32)
            if not np.isfinite(made).all():
                raise ValueError(
                    f"{what}: column {feature.name!r} holds a number beyond what single precision can hold"
                )
            parts.append(made)
        return np.concatenate(parts, 1)

    def as_dict(self) -> list[dict[str, Any]]:
        """Ready for JSON."""
        return [{"kind": type(one).__name__.lower(), **dataclasses.asdict(one)} for one in self.features]

    @staticmethod
    def from_dict(kept: Iterable[Mapping[str, Any]]) -> "Preparation":
        kinds: dict[str, Any] = {kind.__name__.lower(): kind for kind in (Number, Categories)}
        read = []
        for one in kept:
            values = {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
            read.append(kinds[one["kind"]](**{key: value for key, value in values.items() if key != "kind"}))
        return Preparation(tuple(read))


def sums_of(columns: Columns, as_categories: Iterable[str]) -> Sums:
    """What a site tells of its training rows."""
    marked = set(as_categories)
    return {
        name: CategorySums.of(column.texts()) if name in marked else NumberSums.of(column.values)
        for name, column in columns.items()
    }


def added(told: Sequence[Sums]) -> Sums:
    """What all sites tell together."""
    return {name: reduce(lambda a, b: a + b, [one[name] for one in told]) for name in told[0]}  # type: ignore[operator]


def agreed(sums: Sums, rare: int = RARE) -> tuple[Preparation, dict[str, str]]:
    """The preparation that follows from all sites' sums, and the columns left out with the reason why."""
    features, left_out = list[Feature](), dict[str, str]()
    for name, told in sums.items():
        feature = _number(name, told) if isinstance(told, NumberSums) else _categories(name, told, rare)
        if isinstance(feature, str):
            left_out[name] = feature
        else:
            features.append(feature)
    return Preparation(tuple(features)), left_out


def _number(name: str, told: NumberSums) -> Feature | str:
    if not told.count:
        return "no training row has a value"
    deviation = (told.squares / told.count) ** 0.5
    if not (math.isfinite(told.mean) and math.isfinite(deviation)):
        return "its numbers are too large for a mean and a deviation"
    if deviation <= 1e-12 * abs(told.mean):
        if not told.missing:
            return "all training rows have the same value"
        deviation = 1.0
    return Number(name, told.mean, deviation, told.missing > 0)


def _categories(name: str, told: CategorySums, rare: int) -> Feature | str:
    if not told.counts:
        return "no training row has a value"
    frequent = sorted(told.counts, key=lambda text: (-told.counts[text], text))
    usual, kept = frequent[0], sorted(text for text in frequent[1:] if told.counts[text] >= rare)
    others = len(kept) < len(frequent) - 1
    if not kept and not others and not told.missing:
        return "all training rows have the same value"
    return Categories(name, usual, tuple(kept), others, told.missing > 0)
