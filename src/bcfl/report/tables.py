"""The numbers that people compare, as Markdown, CSV or LaTeX: one row a group of runs, mean ± deviation over seeds."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bcfl.likelihood.measures import TITLES
from bcfl.methods import remarks
from bcfl.predict.metrics import MORE_IS_BETTER
from bcfl.report.grouping import mean_and_deviation, text_of, title_of
from bcfl.report.reading import Group, Run, is_installed, unfinished_runs


@dataclass(frozen=True)
class Measure:
    """A column: what it is called, where it comes from, how it is written."""

    key: str
    title: str
    value_of: Callable[[Run], float | None]
    form: str
    lower_is_better: bool = False


def _last(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.last(key)


def _drift(key: str) -> Callable[[Run], float | None]:
    return lambda run: None if run.drift is None else run.drift[key]


OTHERS = tuple(  # what suits other targets than classes
    Measure(name, title, _last(name), ".3f", lower_is_better=name not in MORE_IS_BETTER)
    for name, title in TITLES.items()
    if name not in ("accuracy", "macro_f1", "nll", "ece", "brier")
)
MEASURES = (
    Measure("accuracy", "accuracy", _last("accuracy"), ".3f"),
    Measure("macro_f1", "macro F1", _last("macro_f1"), ".3f"),
    Measure("nll", "NLL", _last("nll"), ".3f", lower_is_better=True),
    Measure("ece", "ECE", _last("ece"), ".3f", lower_is_better=True),
    *OTHERS,
    Measure("ari", "agreement", _last("ari"), ".3f"),
    Measure("false_switches", "false switches", _drift("false_switches"), ".3f", lower_is_better=True),
    Measure("rounds_until_found", "rounds until found", _drift("rounds_until_found"), ".3f", lower_is_better=True),
    Measure("total_steps", "total steps", lambda run: float(run.work("local_steps").sum()), ",.0f"),
    Measure("rounds", "rounds", lambda run: float(len(run.rounds)), ",.0f"),
)


def leading(run: Run) -> str:
    """The measure that tells most of a run, by its likelihood: of classes the accuracy."""
    told = run.last("lead")
    return "accuracy" if told is None else str(told["measure"])


def shown_measures(groups: Sequence[Group]) -> list[Measure]:
    """The measures that at least one run has (no agreement where no true groups are known).

    Rounds only where they are no setting that tells the groups apart: then they stand there.
    """
    measures = [m for m in MEASURES if not any(f"experiment.{m.key}" in group.settings for group in groups)]
    return [m for m in measures if any(m.value_of(run) is not None for group in groups for run in group.counted)]


def cells(group: Group, measures: Sequence[Measure]) -> list[tuple[float, float] | None]:
    """Mean and deviation of each measure over the group's runs that count."""
    return [mean_and_deviation([measure.value_of(run) for run in group.counted]) for measure in measures]


def written(cell: tuple[float, float] | None, measure: Measure, seeds: int, plus_minus: str = " ± ") -> str:
    if cell is None:
        return ""
    mean, deviation = cell
    # A cost that is the same for all seeds needs no deviation beside it; a quality of several seeds always has one.
    shows_deviation = seeds > 1 and (measure.form == ".3f" or deviation > 0)
    return f"{mean:{measure.form}}" + (f"{plus_minus}{deviation:{measure.form}}" if shows_deviation else "")


def names(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """What tells the groups apart, in columns of its own: their titles and, for each group, what is in them."""
    varied = list(dict.fromkeys(key for group in groups for key in group.settings))
    rows = [
        [group.method, *(text_of(group.settings[key]) if key in group.settings else "" for key in varied)]
        for group in groups
    ]
    return ["method", *map(title_of, varied)], rows


def said_beside(groups: Sequence[Group]) -> list[str]:
    """What must be said beside the numbers: of the methods, and of runs that are not complete."""
    return [*remarks(group.method for group in groups if is_installed(group.method)), *unfinished_runs(groups)]


def written_rows(groups: Sequence[Group], plus_minus: str = " ± ") -> tuple[list[str], list[str], list[list[str]]]:
    """Titles of what tells the groups apart, titles of what is measured, and both for each group as text."""
    measures, (titles, named) = shown_measures(groups), names(groups)
    rows = []
    for group, own in zip(groups, named, strict=True):
        both = zip(cells(group, measures), measures, strict=True)
        seeds = len(group.counted)
        rows.append([*own, *(written(cell, measure, seeds, plus_minus) for cell, measure in both), str(seeds)])
    return titles, [*(measure.title for measure in measures), "seeds"], rows


def markdown(groups: Sequence[Group]) -> str:
    titles, numbers, rows = written_rows(groups)
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    shown = [[*titles, *numbers], ["---"] * len(titles) + ["---:"] * len(numbers), *escaped]
    lines = [f"| {' | '.join(row)} |" for row in shown]
    for remark in said_beside(groups):
        lines += ["", f"{remark}."]
    return "\n".join(lines) + "\n"


def comma_separated(groups: Sequence[Group]) -> str:
    """Full precision, mean and deviation in columns of their own; unfinished runs count only where none is complete."""
    measures, (titles, named) = shown_measures(groups), names(groups)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = [f"{m.key}_{part}" for m in measures for part in ("mean", "sd")]
    writer.writerow([*titles, *numbers, "seeds", "complete", "unfinished"])
    for group, own in zip(groups, named, strict=True):
        both = [number for cell in cells(group, measures) for number in (cell or ("", ""))]
        unfinished = len(group.unfinished)
        writer.writerow([*own, *both, len(group.counted), len(group.runs) - unfinished, unfinished])
    return text.getvalue()


def latex(groups: Sequence[Group]) -> str:
    """A tabular with booktabs rules."""
    titles, numbers, rows = written_rows(groups, r" \pm ")
    head = " & ".join([*map(_escaped, titles), *numbers])
    shape = "l" * len(titles) + "r" * len(numbers)
    lines = [rf"\begin{{tabular}}{{{shape}}}", r"\toprule", head + r" \\", r"\midrule"]
    for row in rows:
        named, (*measured, seeds) = row[: len(titles)], row[len(titles) :]
        texts = [f"${text.replace(',', '{,}')}$" if text else "" for text in measured]
        lines.append(" & ".join([*map(_escaped, named), *texts, seeds]) + r" \\")
    lines += [r"\bottomrule", *_spanning(groups, len(shape)), r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _spanning(groups: Sequence[Group], columns: int) -> list[str]:
    """What must be said beside the numbers, in lines below them."""
    said = said_beside(groups)
    return [rf"\multicolumn{{{columns}}}{{l}}{{\footnotesize {_escaped(remark)}.}} \\" for remark in said]


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\&%$#_{}~^]", lambda found: special.get(found[0], "\\" + found[0]), text)


FORMATS: dict[str, Callable[[Sequence[Group]], str]] = {
    "markdown": markdown,
    "csv": comma_separated,
    "latex": latex,
}
