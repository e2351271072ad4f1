"""How the rows of the paper's tables stand, in one table: reached, nearly, missed, not run."""

from collections.abc import Iterable, Mapping
from statistics import fmean

from measured import MEASURES, STATED_ROUNDS, STATED_STEPS, Paper, Printed, Row, setting_of
from tables import table

from bcfl.experiment.sweep import text_of, title_of

REACHED, NEAR, MISSED, NOT_RUN = STANDINGS = ("at or above it", "within its deviation", "below it", "not run")
SUMMARY = (
    "Accuracy and macro F1 both have to be at or above the paper's, or below it by no more than its standard "
    "deviation. A method that was run with several settings counts once: with the row of most seeds, of several "
    "such with the one that comes nearest. Other steps or rounds than the paper states stand behind its name."
)
STATED = {"training.local_steps": STATED_STEPS, "experiment.rounds": STATED_ROUNDS}


def shortfall(row: Row, key: str, theirs: Printed) -> float:
    """By how many percent the row is below the paper's number, as both are printed; 0 if it is not."""
    return max(0.0, round(theirs.value - round(fmean(row.finals(key)), 2), 2))


def standing(row: Row, printed: Mapping[str, Printed]) -> str:
    gaps = {key: shortfall(row, key, printed[key]) for key in MEASURES}
    if not any(gaps.values()):
        return REACHED
    return NEAR if all(gap <= (printed[key].deviation or 0.0) for key, gap in gaps.items()) else MISSED


def _named(row: Row) -> str:
    """The method, and what of its work is not as the paper states."""
    told = {key: setting_of(row.runs[0], key) for key in STATED}
    other = [f"{title_of(key)} {text_of(value)}" for key, value in told.items() if value != STATED[key]]
    return f"{row.method} ({', '.join(other)})" if other else row.method


def in_short(paper: Paper, rows_at: Mapping[tuple[str, str, int], Iterable[Row]]) -> list[str]:
    """One line for each setting of the paper: which of its rows stand how; `rows_at` holds what was run of them."""
    lines = []
    for key, methods in paper.items():
        rows = list(rows_at.get(key, ()))
        found: dict[str, list[str]] = {name: [] for name in STANDINGS}
        for method, printed in methods.items():
            tried = [row for row in rows if row.method == method]
            most = max((len(row.runs) for row in tried), default=0)
            own = [(standing(row, printed), _named(row)) for row in tried if len(row.runs) == most]
            stands, name = min(own, key=lambda one: STANDINGS.index(one[0]), default=(NOT_RUN, method))
            found[stands].append(name)
        cells = [f"all {len(own)}" if len(own) == len(methods) else ", ".join(own) for own in found.values()]
        data, split, clusters = key
        lines.append([f"{data}, {split}, K = {clusters}", *cells])
    return ["## In short", "", SUMMARY, "", *table(["the paper's", *STANDINGS], lines), ""] if lines else []
