"""Figures and tables as Markdown."""

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from scipy.stats import t


def interval(values: Sequence[float]) -> str:
    """The mean with its 95 % confidence interval; of one value, the value."""
    mean = f"{fmean(values):+.4f}".replace("-0.0000", "+0.0000")
    if len(values) < 2:
        return mean
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean} ± {half:.4f}"


def show(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation; a single value has none."""
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
