"""What the default method tells beyond predictions: what joining brings each site, and how sites differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bcfl.belief.heads import HeadLayout
from bcfl.methods.candidates import ALONE, ONE, Choice
from bcfl.methods.mixedstate import MixedState
from bcfl.randomness import generator

DRAWS = 2000  # of sites, with replacement
SHARE = 0.95
LOGISTIC = math.pi**2 / 3  # the variance of a logistic noise, by which yes-or-no targets have an intraclass correlation


@dataclass(frozen=True)
class Gain:
    """By how much held-out rows are likelier than under something else, in nats a row."""

    of_site: Tensor  # (client,); NaN where nothing is known
    mean: float
    low: float  # of a 95 % interval of the mean, by drawing sites again
    high: float

    def __repr__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class Benefit:
    """What was chosen, how clear that was, and what it brings to each site, all by held-out rows."""

    chosen: str
    candidates: tuple[str, ...]
    held_out: tuple[float, ...]  # (candidate,): mean over sites of a held-out row's log-likelihood
    behind: tuple[float, ...]  # (candidate,): how much less than the best
    error: tuple[float, ...]  # (candidate,): the standard error of that, paired over sites
    over_alone: Gain | None  # None: it was not tried
    over_one: Gain | None

    def __repr__(self) -> str:
        lines = [f"chosen by held-out rows: {self.chosen}"]
        for name, value, less, error in zip(self.candidates, self.held_out, self.behind, self.error, strict=True):
            lines.append(f"{name:30s} {value:.4f}, behind the best by {less:.4f} ± {error:.4f}")
        for what, gain in (("each site alone", self.over_alone), ("one model for all", self.over_one)):
            if gain is not None:
                lines.append(f"gain over {what}, nats a row: {gain}")
        return "\n  ".join(lines)


def benefit_of(choice: Choice) -> Benefit:
    """What the choice says of its candidates."""
    table = choice.held_out
    known = table.isfinite().all(1)
    mean = table[known].mean(0)
    return Benefit(
        choice.candidates[choice.chosen],
        choice.candidates,
        tuple(mean.tolist()),
        tuple(choice.behind.tolist()),
        tuple(choice.error.tolist()),
        _gain(choice, str(ALONE)),
        _gain(choice, str(ONE)),
    )


def _gain(choice: Choice, over: str) -> Gain | None:
    if over not in choice.candidates or not len(choice.held_out):
        return None
    of_site = choice.held_out[:, choice.chosen] - choice.held_out[:, choice.candidates.index(over)]
    known = of_site[of_site.isfinite()]
    if not len(known):
        return None
    drawn = torch.randint(len(known), (DRAWS, len(known)), generator=generator(0, "benefit"))
    edges = torch.tensor([(1 - SHARE) / 2, (1 + SHARE) / 2], dtype=known.dtype)
    low, high = known[drawn].mean(1).quantile(edges).tolist()
    return Gain(of_site, float(known.mean()), low, high)


@dataclass(frozen=True)
class Coefficient:
    """A coefficient of a cluster as statisticians report it."""

    cluster: int
    name: str
    mean: float
    standard_error: float
    variance: float  # between the cluster's sites
    intraclass: float | None  # of an intercept: its variance's share in what is not explained

    @property
    def row(self) -> list[str]:
        told = [f"{number:.4g}" for number in (self.mean, self.standard_error, self.variance)]
        return [str(self.cluster), self.name, *told, "" if self.intraclass is None else f"{self.intraclass:.3f}"]


@dataclass(frozen=True)
class SpreadTable:
    """Means, standard errors and variances between sites of every coefficient, cluster by cluster."""

    coefficients: tuple[Coefficient, ...]
    noise: float | None  # the residual variance, where the likelihood is normal

    titles = ("cluster", "coefficient", "mean", "standard error", "variance between sites", "intraclass correlation")

    def __repr__(self) -> str:
        rows = [list(self.titles), *(one.row for one in self.coefficients)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, *([] if self.noise is None else [f"residual variance {self.noise:.4g}"])])


def spread_table(
    state: MixedState, layout: HeadLayout, inputs: Sequence[str] | None, kind: str, scale: float = 1.0
) -> SpreadTable:
    """The table of a linear model; `scale` is the unit in which the model sees a real target."""
    heads, error = state.heads, state.error
    if heads is None or error is None:
        raise ValueError("a table of the spread is there for linear models whose sites share clusters")
    names = _names(layout, inputs)
    noise = float(heads.noise[0]) if layout.exact else LOGISTIC if kind == "labels" else None
    coefficients = []
    for k in range(len(heads)):
        for place, name in enumerate(names):
            variance = float(heads.variance[k, place])
            is_intercept = name.endswith("intercept")
            share = variance / (variance + noise) if is_intercept and noise is not None else None
            mean, spread = float(heads.mean[k, place]) * scale, float(error[k, place]) * scale
            coefficients.append(Coefficient(k, name, mean, spread, variance * scale**2, share))
    return SpreadTable(tuple(coefficients), float(heads.noise[0]) * scale**2 if layout.exact else None)


def _names(layout: HeadLayout, inputs: Sequence[str] | None) -> list[str]:
    """The names of all coefficients, in their order."""
    if inputs is None or len(inputs) != layout.num_inputs:
        inputs = [f"x{place}" for place in range(1, layout.num_inputs + 1)]
    row = [*inputs, *(["intercept"] if layout.bias else [])]
    unknowns = [] if layout.exact else [f"unknown {place}" for place in range(1, layout.num_unknowns + 1)]
    if layout.num_outputs == 1:
        return [*unknowns, *row]
    return [*unknowns, *(f"output {c}: {name}" for c in range(layout.num_outputs) for name in row)]
