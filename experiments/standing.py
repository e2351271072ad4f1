"""How the rows of the paper's tables stand, in one table: reached, nearly, missed, not run."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from statistics import fmean
from typing import Any

from measured import (
    ENOUGH_SEEDS,
    MEASURES,
    SETTING_OF,
    STATED,
    USUAL,
    Paper,
    Printed,
    Record,
    Row,
    Setting,
    paper_key,
    rank,
    setting_of,
    unusual,
    work_of,
)
from tables import table

from bcfl.runs.sweep import text_of, title_of

REACHED, NEAR, MISSED, NOT_RUN = STANDINGS = ("at or above it", "within its deviation", "below it", "not run")
OWN_DRAW = "our own draw"
OWN_STATISTICS = "the clients' own BatchNorm statistics"
MARKS = {REACHED: "✓", NEAR: "≈", MISSED: "✗"}
GLANCE = (
    "Accuracy / macro F1 in percent, means over seeds, the paper's in brackets. "
    f"{', '.join(f'{mark} {standing}' for standing, mark in MARKS.items())}. Which row stands for a method, and with "
    f"which settings, is told [below](#in-short); a raised figure is the number of seeds, where that is less than "
    f"{ENOUGH_SEEDS}."
)
SUMMARY = (
    "Accuracy and macro F1 of the last round both have to be at or above the paper's, or below it by no more than its "
    "standard deviation, where it gives one. A method counts once, with the steps and rounds that the paper states and "
    "without racing, where it was run so; of several such rows with that of most seeds, then the most usual one (of "
    "FedSoft the one that draws 5 clients for a cluster where there are ten at most, as the published code does of "
    "eight, else 10). What is not as "
    "usual stands behind its name, and so does where it stands with other work, if that is better with the same seeds "
    "and by the mean of the last ten rounds, too, or with [the clients' own BatchNorm "
    "statistics](#tested-as-the-published-code-tests), where that was measured and is better. FedAvg has no K: its "
    "runs are the same for every K of a problem. "
    f"A raised figure is the number of seeds, where that is less than {ENOUGH_SEEDS}."
)
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
OTHERWISE = (
    "A single last round may be a lucky or an unlucky one. By the mean of the last ten rounds (accuracy and macro F1 "
    "in brackets) these would stand elsewhere:"
)

Ends = Callable[[Row, str], list[float]]  # what a row has come to by a measure, seed by seed
Tested = Sequence[Mapping[str, Any]]  # last models with other BatchNorm statistics, by batch_statistics.py


@dataclass(frozen=True)
class Otherwise:
    """How a method stands, too, and with what else: with other work, or tested in another way."""

    stands: str
    figures: str
    seeds: str  # a raised figure where they are few
    how: str


def shortfall(ours: Sequence[float], theirs: Printed) -> float:
    """By how many percent the mean over seeds is below the paper's number, as both are printed; 0 if it is not."""
    return max(0.0, round(theirs.value - round(fmean(ours), 2), 2))


def standing(row: Row, printed: Mapping[str, Printed], ends: Ends = Row.finals) -> str:
    gaps = {key: shortfall(ends(row, key), printed[key]) for key in MEASURES}
    if not any(gaps.values()):
        return REACHED
    return NEAR if all(gap <= (printed[key].deviation or 0.0) for key, gap in gaps.items()) else MISSED


def at_a_glance(
    tables: Mapping[str, Sequence[Setting]],
    paper: Paper,
    rows_at: Mapping[Setting, Sequence[Row]],
    tested: Tested = (),
) -> list[str]:
    """The paper's tables as it prints them, a line a method and a column a setting, with ours before its numbers."""
    lines = []
    for name, settings in tables.items():
        run = [key for key in settings if rows_at.get(key)]
        methods = dict.fromkeys(method for key in run for method in paper[key])
        lines_of, columns = {method: [method] for method in methods}, ["method"]
        for key in run:
            standings = {method: _glance(method, key, paper[key], rows_at[key], tested) for method in methods}
            own = any(cells[1] for cells in standings.values())
            columns += [_heading(key), f"there, with {OWN_STATISTICS}"][: 1 + own]
            for method, cells in standings.items():
                lines_of[method] += cells[: 1 + own]
        without = [", ".join(key[:2]) for key in settings if key not in run]
        lines += (
            [f"### {name}", "", *table(columns, lines_of.values()), "", *_counted(run, paper, rows_at)] if run else []
        )
        lines += [line for key in run for line in _not_as_usual(key, paper[key], rows_at[key])]
        lines += [f"Not run: {'; '.join(without)}.", ""] if run and without else []
    return ["## At a glance", "", GLANCE, "", *lines] if lines else []


def _counted(run: Sequence[Setting], paper: Paper, rows_at: Mapping[Setting, Sequence[Row]]) -> list[str]:
    """How many rows of these settings stand how."""
    found = Counter(
        standing(row, printed) if (row := stands_for(method, rows_at[key])) else NOT_RUN
        for key in run
        for method, printed in paper[key].items()
    )
    told = ", ".join(f"{found[name]} {name}" for name in STANDINGS if found[name])
    return [f"Of these {found.total()} rows, beside the paper's number: {told}.", ""]


def _heading(key: Setting) -> str:
    """Of what was run there: on which split, where that is not the one that the published scripts draw."""
    drawn = next((said for said, setting in SETTING_OF.items() if setting == key[1]), f"{key[1]}, {OWN_DRAW}")
    return f"{key[0]}, {drawn}"


def _glance(
    method: str, key: Setting, methods: Mapping[str, Mapping[str, Printed]], rows: Sequence[Row], tested: Tested
) -> tuple[str, str]:
    """How a method stands there, and how it does with the clients' own BatchNorm statistics, where measured."""
    if method not in methods:
        return "", ""
    printed = methods[method]
    theirs = _pair(printed[measure].value for measure in MEASURES)
    row = stands_for(method, rows)
    if row is None:
        return f"{NOT_RUN} ({theirs})", ""
    told = [f"{MARKS[standing(row, printed)]} {_figures(row)}{few_seeds(row)} ({theirs})"]
    told += [f"{MARKS[one.stands]} {one.figures}{one.seeds} with {one.how}" for one in _better(row, printed, rows)]
    own = _with_own_statistics(key, row, printed, tested)
    return "; ".join(told), f"{MARKS[own.stands]} {own.figures}{own.seeds}" if own else ""


def _not_as_usual(key: Setting, methods: Mapping[str, Mapping[str, Printed]], rows: Sequence[Row]) -> list[str]:
    """With which settings the rows of a column were run, where not with the usual ones, and what these gave."""
    found = {method: row for method in methods if (row := stands_for(method, rows)) is not None}
    told = {method: _told({k: v for k, v in unusual(row).items() if k not in STATED}) for method, row in found.items()}
    usual = [row for row in rows if told.get(row.method) and not unusual(row)]
    of_bcfl = [method for method in told if method.startswith("bcfl")]
    parts = []
    for with_what in dict.fromkeys(filter(None, told.values())):
        own = [method for method in told if told[method] == with_what]
        parts.append(f"{with_what} for {'all of BCFL' if own == of_bcfl else ', '.join(own)}")
    if usual:
        marked = ((row, MARKS[standing(row, methods[row.method])]) for row in usual)
        figures = (f"{row.method} {mark} {_figures(row)}{few_seeds(row)}" for row, mark in marked)
        parts.append(f"with the defaults: {', '.join(figures)}")
    return [f"{_heading(key)}: {'; '.join(parts)}.", ""] if parts else []


def _figures(row: Row) -> str:
    return _pair(fmean(row.finals(key)) for key in MEASURES)


def _pair(figures: Iterable[float]) -> str:
    return " / ".join(f"{figure:.2f}" for figure in figures)


def stands_for(method: str, rows: Iterable[Row]) -> Row | None:
    """The row that counts for a method, if it was run; nothing hangs on how well it does."""
    return min((row for row in rows if row.method == method), key=rank, default=None)


def in_short(paper: Paper, rows_at: Mapping[Setting, Sequence[Row]], tested: Tested = ()) -> list[str]:
    """One line for each setting of the paper: which of its rows stand how; `rows_at` holds what was run of them."""
    lines, elsewhere = [], []
    for key, methods in paper.items():
        rows = rows_at.get(key, ())
        own_draw = rows and key[1] not in SETTING_OF.values()
        heading = f"{key[0]}, {key[1]}, K = {key[2]}" + (f", {OWN_DRAW}" if own_draw else "")
        found: dict[str, list[str]] = {name: [] for name in STANDINGS}
        moved = []
        for method, printed in methods.items():
            row = stands_for(method, rows)
            if row is None:
                found[NOT_RUN].append(method)
                continue
            stands = standing(row, printed)
            better, own = _better(row, printed, rows), _with_own_statistics(key, row, printed, tested)
            if own and STANDINGS.index(own.stands) < STANDINGS.index(stands):
                better.append(own)
            found[stands].append(_named(row, better))
            moved += _lately(row, printed, stands)
        cells = [f"all {len(own)}" if own == list(methods) else ", ".join(own) for own in found.values()]
        lines.append([heading, *cells])
        elsewhere += [f"- {heading}: {'; '.join(moved)}."] if moved else []
    if not lines:
        return []
    shown = ["## In short", "", SUMMARY, "", *table(["the paper's", *STANDINGS], lines), ""]
    return [*shown, OTHERWISE, "", *elsewhere, ""] if elsewhere else shown


def _better(row: Row, printed: Mapping[str, Printed], rows: Iterable[Row]) -> list[Otherwise]:
    """With what other work its method stands better."""
    return [
        Otherwise(standing(other, printed), _figures(other), few_seeds(other), _changed(row, other))
        for other in rows
        if other.method == row.method and work_of(other) != work_of(row) and _surely_better(other, row, printed)
    ]


def _with_own_statistics(key: Setting, row: Row, printed: Mapping[str, Printed], tested: Tested) -> Otherwise | None:
    """How its last models do with BatchNorm's statistics of each client's own training examples, where measured."""
    own = [
        record["of_training"]
        for record in tested
        if (record["method"], paper_key(tuple(record["problem"]), record["clusters"] or key[2])) == (row.method, key)
        and "of_training" in record
        and any(_is_of(record, run) for run in row.runs)
    ]
    if len(own) != len(row.runs):
        return None
    stands = standing(row, printed, lambda _, measure: [figures[measure] for figures in own])
    figures = _pair(fmean(one[measure] for one in own) for measure in MEASURES)
    return Otherwise(stands, figures, few_seeds(row), OWN_STATISTICS)


def _is_of(tested: Mapping[str, Any], run: Record) -> bool:
    """Whether these are the last models of that run: runs with other settings may have its method and seed."""
    learned = run["result"]["accuracy"]
    return tested["seed"] == run["result"]["seed"] and isclose(tested["learned"]["accuracy"], 100 * learned)


def _surely_better(other: Row, row: Row, printed: Mapping[str, Printed]) -> bool:
    """Than this row, than this one with its seeds, and by the last rounds as well, where all were tested."""
    worse = [row, *filter(None, [row.with_draws_of(other)])]
    ends = [ends for ends in (Row.finals, Row.lately) if all(ends(one, "accuracy") for one in (*worse, other))]
    return all(_place(other, printed, by) < _place(one, printed, by) for by in ends for one in worse)


def _place(row: Row, printed: Mapping[str, Printed], ends: Ends) -> int:
    return STANDINGS.index(standing(row, printed, ends))


def _named(row: Row, better: Iterable[Otherwise]) -> str:
    """The method with the number of its seeds, what is not as usual, and with what else it stands better, and how."""
    # What else tells it from other rows of the method; K stands in the heading.
    further = {key: value for key, value in row.settings.items() if key not in (*USUAL, "method.num_clusters")}
    told = [_told(unusual(row) | further)]
    told += [f"{one.stands} with {one.how}{one.seeds}" for one in better]
    behind = "; ".join(filter(None, told))
    return row.method + few_seeds(row) + (f" ({behind})" if behind else "")


def _changed(row: Row, other: Row) -> str:
    """In what the other row is not as this one, of what is usually the same."""
    own = {key: setting_of(row.runs[0], key) for key in USUAL}
    return _told({key: value for key in USUAL if (value := setting_of(other.runs[0], key)) != own[key]})


def _told(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{title_of(key)} {text_of(value)}" for key, value in settings.items())


def few_seeds(row: Row) -> str:
    return str(len(row.runs)).translate(RAISED) if len(row.runs) < ENOUGH_SEEDS else ""


def _lately(row: Row, printed: Mapping[str, Printed], stands: str) -> list[str]:
    """Where the row would stand by its last rounds, if that is elsewhere; nothing where not all were tested."""
    means = {key: row.lately(key) for key in MEASURES}
    if not all(means.values()) or (there := standing(row, printed, Row.lately)) == stands:
        return []
    return [f"{row.method} {there} ({', '.join(f'{fmean(values):.2f}' for values in means.values())}), not {stands}"]
