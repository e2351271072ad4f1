"""RESULTS.md: the paper's two tables with our figures in them, each linked to its data, and a line of reason each."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Any

from measured import (
    ENOUGH_SEEDS,
    MEASURES,
    SETTING_OF,
    STATED,
    Paper,
    Printed,
    Record,
    Row,
    Setting,
    is_drift,
    paper_key,
    paper_numbers,
    problem_of,
    rank,
    rows_by_setting,
    rows_of,
    settings_of,
    tested_problems,
    unusual,
    work_of,
)
from tables import show, table

from bcfl.files import write_atomically
from bcfl.report.grouping import text_of, title_of

REACHED, NEAR, MISSED = MARKS = ("✓", "≈", "✗")  # at or above the paper's, within its deviation, below it
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
OWN_STATISTICS = "results/predictive/batch_statistics-fashion_mnist.json"
TABLES = {"table1": "Table 1", "table2": "Table 2"}
PAGE = Path(__file__).with_name("results-page.md")  # what is written by hand; the tables go in between


@dataclass(frozen=True)
class Reason:
    """Why rows of one setting are below the paper's; bound to the seeds that its writer has looked at."""

    problem: str  # "data set, split", as the tables' columns name it
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    why: str


def results_page(records: Sequence[Record], paper_rows: Sequence[Mapping[str, str]], root: Path) -> str:
    """The whole page, in Markdown."""
    paper = paper_numbers(paper_rows)
    rows_at = rows_by_setting(tested_problems(records), paper)
    own_statistics = read_own_statistics(root)
    reasons = read_reasons(root)
    text = PAGE.read_text()
    for name in TABLES:
        settings = settings_of(paper_rows, name)
        run = [key for key in settings if rows_at.get(key)]
        text = text.replace(f"{{{name}}}", "\n".join(the_table(run, paper, rows_at, own_statistics)))
        below = [line for key in run for line in the_reasons(key, paper, rows_at[key], reasons)]
        text = text.replace(f"{{{name}-reasons}}", "\n".join(below))
    return text


def the_table(
    settings: Sequence[Setting], paper: Paper, rows_at: Mapping[Setting, Sequence[Row]], own_statistics: Sequence[Any]
) -> list[str]:
    """A line a method and a column a setting: ours before the paper's number, linked to the data of its first seed."""
    methods = dict.fromkeys(method for key in settings for method in paper[key])
    columns, lines = ["method"], {method: [method] for method in methods}
    for key in settings:
        columns.append(heading(key))
        cells = {method: cell(method, key, paper, rows_at[key]) for method in methods}
        beside = {method: with_own_statistics(method, key, paper, rows_at[key], own_statistics) for method in methods}
        for method, line in lines.items():
            line += [cells[method], beside[method]] if any(beside.values()) else [cells[method]]
        columns += ["the same, own statistics"] if any(beside.values()) else []
    return table(columns, lines.values())


def heading(key: Setting) -> str:
    return f"{key[0]}, {key[1]}" + ("" if key[1] in SETTING_OF.values() else ", our own draw")


def cell(method: str, key: Setting, paper: Paper, rows: Sequence[Row]) -> str:
    """How a method stands there: mark, figures with their deviation, seeds if few, and the paper's figures."""
    if method not in paper[key]:
        return ""
    printed = paper[key][method]
    theirs = " / ".join(f"{printed[measure].value:.2f}" for measure in MEASURES)
    row = stands_for(method, rows)
    if row is None:
        return f"not run ({theirs})"
    further = [
        f"; {standing(one, printed)} {figures(one)} with {work_in_words(one)}" for one in better(row, rows, printed)
    ]
    return f"{standing(row, printed)} {figures(row)} ({theirs}){''.join(further[:1])}"


def figures(row: Row) -> str:
    few = str(len(row.runs)).translate(RAISED) if len(row.runs) < ENOUGH_SEEDS else ""
    return f"[{' / '.join(show(row.finals(key)) for key in MEASURES)}]({row.runs[0]['file']}){few}"


def stands_for(method: str, rows: Iterable[Row]) -> Row | None:
    """The row that counts for a method, if it was run; nothing hangs on how well it does."""
    return min((row for row in rows if row.method == method), key=rank, default=None)


def standing(row: Row, printed: Mapping[str, Printed], values: Mapping[str, float] | None = None) -> str:
    """By accuracy and macro F1 of the last round, both: the mean over seeds beside the paper's number."""
    found = values or {key: fmean(row.finals(key)) for key in MEASURES}
    gaps = {key: max(0.0, round(printed[key].value - round(found[key], 2), 2)) for key in MEASURES}
    if not any(gaps.values()):
        return REACHED
    return NEAR if all(gap <= (printed[key].deviation or 0.0) for key, gap in gaps.items()) else MISSED


def better(row: Row, rows: Iterable[Row], printed: Mapping[str, Printed]) -> list[Row]:
    """The rows of its method with other work, on its seeds at least, that stand better."""
    place = MARKS.index(standing(row, printed))
    return [
        other
        for other in rows
        if other.method == row.method
        and work_of(other) != work_of(row)
        and len(other.runs) >= min(len(row.runs), ENOUGH_SEEDS)
        and MARKS.index(standing(other, printed)) < place
    ]


def work_in_words(row: Row) -> str:
    told = {key: value for key, value in unusual(row).items() if key in STATED}
    return ", ".join(f"{title_of(key)} {text_of(value)}" for key, value in told.items())


def read_own_statistics(root: Path) -> list[Any]:
    """What batch_statistics.py measured: last models with BatchNorm's statistics of each client's own examples."""
    measured: list[Any] = json.loads((root / OWN_STATISTICS).read_text())
    return measured


def with_own_statistics(method: str, key: Setting, paper: Paper, rows: Sequence[Row], measured: Sequence[Any]) -> str:
    """How the very models of the row do with the clients' own BatchNorm statistics, where that was measured."""
    row = stands_for(method, rows)
    found = [
        one["of_training"]
        for one in measured
        if row is not None
        and (one["method"], paper_key(tuple(one["problem"]), one["clusters"] or key[2])) == (method, key)
        and any(isclose(one["learned"]["accuracy"], 100 * run["result"]["accuracy"]) for run in row.runs)
    ]
    if row is None or len(found) != len(row.runs):
        return ""
    means = {measure: fmean(one[measure] for one in found) for measure in MEASURES}
    shown = " / ".join(f"{mean:.2f}" for mean in means.values())
    return f"{standing(row, paper[key][method], means)} [{shown}]({OWN_STATISTICS})"


def read_reasons(root: Path) -> list[Reason]:
    entries = tomllib.loads((root / "results/reasons.toml").read_text())["reason"]
    return [Reason(one["problem"], tuple(one["methods"]), tuple(one["seeds"]), one["why"]) for one in entries]


def the_reasons(key: Setting, paper: Paper, rows: Sequence[Row], reasons: Sequence[Reason]) -> list[str]:
    """One line for the rows below the paper's that have the same reason; why is not known unless somebody says so."""
    missed = [
        row
        for method, printed in paper[key].items()
        if (row := stands_for(method, rows)) is not None and standing(row, printed) == MISSED
    ]
    by_reason: dict[str, list[str]] = {}
    for row in missed:
        by_reason.setdefault(reason_of(heading(key), row, reasons), []).append(row.method)
    return [f"- {key[0]}, {', '.join(methods)}: {why}" for why, methods in by_reason.items()]


def reason_of(problem: str, row: Row, reasons: Iterable[Reason]) -> str:
    fits = (r.why for r in reasons if (r.problem, set(r.seeds)) == (problem, row.seeds) and row.method in r.methods)
    return next(fits, "why is not known.")


def write_rows(records: Sequence[Record], path: Path) -> None:
    """Every row that was run, studies of defaults and of K included, as a table for other programs."""
    columns = ["problem", "of", "row", "seeds", "rounds", "accuracy", "macro_f1", "nll", "agreement", "local_steps"]
    problems: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        kind = "validation" if record["config"]["data"]["validation"] else "drift" if is_drift(record) else "test"
        problems.setdefault((", ".join(problem_of(record)), kind), []).append(record)
    lines = [",".join(columns)]
    for (problem, kind), runs in sorted(problems.items()):
        for row in sorted(rows_of(runs), key=lambda row: row.label):
            values = [
                show(row.finals(key)) if row.finals(key) else "" for key in ("accuracy", "macro_f1", "nll", "ari")
            ]
            numbers = [str(len(row.runs)), str(row.runs[0]["result"]["rounds"]), *values]
            steps = f"{row.spent('local_steps')[-1]:.0f}"
            lines.append(",".join([f'"{problem}"', kind, f'"{row.label}"', *numbers, steps]))
    write_atomically(path, ("\n".join(lines) + "\n").encode())
