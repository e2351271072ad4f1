"""The numbers that people compare, as Markdown, CSV or LaTeX: one row a group of runs, mean ± deviation over seeds."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bcfl.experiment.sweep import mean_and_deviation
from bcfl.report.reading import Group, Run


@dataclass(frozen=True)
class Measure:
    """A column: what it is called, where it comes from, how it is written."""

    key: str
    title: str
    value_of: Callable[[Run], float | None]
    form: str


def _last(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.last(key)


def _drift(key: str) -> Callable[[Run], float | None]:
    return lambda run: None if run.drift is None else run.drift[key]


MEASURES = (
    Measure("accuracy", "accuracy", _last("accuracy"), ".3f"),
    Measure("macro_f1", "macro F1", _last("macro_f1"), ".3f"),
    Measure("nll", "NLL", _last("nll"), ".3f"),
    Measure("ece", "ECE", _last("ece"), ".3f"),
    Measure("ari", "agreement", _last("ari"), ".3f"),
    Measure("false_switches", "false switches", _drift("false_switches"), ".3f"),
    Measure("rounds_until_found", "rounds until found", _drift("rounds_until_found"), ".3f"),
    Measure("local_steps", "local steps", lambda run: float(run.work("local_steps").sum()), ",.0f"),
    Measure("rounds", "rounds", lambda run: float(len(run.rounds)), ",.0f"),
)


def shown_measures(groups: Sequence[Group]) -> list[Measure]:
    """The measures that at least one run has (no agreement where no true groups are known)."""
    return [m for m in MEASURES if any(m.value_of(run) is not None for group in groups for run in _begun(group))]


def _begun(group: Group) -> list[Run]:
    return [run for run in group.runs if run.rounds]


def cells(group: Group, measures: Sequence[Measure]) -> list[tuple[float, float] | None]:
    """Mean and deviation of each measure over the group's runs."""
    return [mean_and_deviation([measure.value_of(run) for run in _begun(group)]) for measure in measures]


def written(cell: tuple[float, float] | None, measure: Measure, seeds: int, plus_minus: str = " ± ") -> str:
    if cell is None:
        return ""
    mean, deviation = cell
    # A cost that is the same for all seeds needs no deviation beside it; a quality of several seeds always has one.
    shows_deviation = seeds > 1 and (measure.form == ".3f" or deviation > 0)
    return f"{mean:{measure.form}}" + (f"{plus_minus}{deviation:{measure.form}}" if shows_deviation else "")


def markdown(groups: Sequence[Group]) -> str:
    measures = shown_measures(groups)
    rows = [["method", *(m.title for m in measures), "seeds"], ["---", *["---:"] * (len(measures) + 1)]]
    for group in groups:
        seeds = len(_begun(group))
        texts = [written(cell, m, seeds) for cell, m in zip(cells(group, measures), measures, strict=True)]
        rows.append([group.label.replace("|", "\\|"), *texts, str(seeds)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def comma_separated(groups: Sequence[Group]) -> str:
    """Full precision, mean and deviation in columns of their own."""
    measures = shown_measures(groups)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [name for m in measures for name in (f"{m.key}_mean", f"{m.key}_sd")]
    writer.writerow(["method", *names, "seeds"])
    for group in groups:
        both = [number for cell in cells(group, measures) for number in (cell or ("", ""))]
        writer.writerow([group.label, *both, len(_begun(group))])
    return text.getvalue()


def latex(groups: Sequence[Group]) -> str:
    """A tabular with booktabs rules."""
    measures = shown_measures(groups)
    head = " & ".join(["method", *(m.title for m in measures), "seeds"])
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(measures) + 1)}}}", r"\toprule", head + r" \\", r"\midrule"]
    for group in groups:
        seeds = len(_begun(group))
        both = zip(cells(group, measures), measures, strict=True)
        texts = [written(cell, m, seeds, r" \pm ").replace(",", "{,}") for cell, m in both]
        numbers = [f"${text}$" if text else "" for text in texts]
        lines.append(" & ".join([_escaped(group.label), *numbers, str(seeds)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\&%$#_{}~^]", lambda found: special.get(found[0], "\\" + found[0]), text)


FORMATS: dict[str, Callable[[Sequence[Group]], str]] = {
    "markdown": markdown,
    "csv": comma_separated,
    "latex": latex,
}
