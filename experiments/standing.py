"""How the rows of the paper's tables stand, in one table: reached, nearly, missed, not run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from measured import ENOUGH_SEEDS, MEASURES, SETTING_OF, USUAL, Paper, Printed, Row, rank, setting_of, unusual, work_of
from tables import table

from bcfl.experiment.sweep import text_of, title_of

REACHED, NEAR, MISSED, NOT_RUN = STANDINGS = ("at or above it", "within its deviation", "below it", "not run")
SUMMARY = (
    "Accuracy and macro F1 of the last round both have to be at or above the paper's, or below it by no more than its "
    "standard deviation, where it gives one. A method counts once, with the steps and rounds that the paper states and "
    "without racing, where it was run so; of several such rows with that of most seeds, then the most usual, then the "
    "nearest one. What is not as usual stands behind its name, and so does where it stands with other work, if that is "
    f"better. A raised figure is the number of seeds, where that is less than {ENOUGH_SEEDS}."
)
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
OTHERWISE = (
    "A single last round may be a lucky or an unlucky one. By the mean of the last ten rounds (accuracy and macro F1 "
    "in brackets) these would stand elsewhere:"
)

Ends = Callable[[Row, str], list[float]]  # what a row has come to by a measure, seed by seed


def shortfall(ours: Sequence[float], theirs: Printed) -> float:
    """By how many percent the mean over seeds is below the paper's number, as both are printed; 0 if it is not."""
    return max(0.0, round(theirs.value - round(fmean(ours), 2), 2))


def standing(row: Row, printed: Mapping[str, Printed], ends: Ends = Row.finals) -> str:
    gaps = {key: shortfall(ends(row, key), printed[key]) for key in MEASURES}
    if not any(gaps.values()):
        return REACHED
    return NEAR if all(gap <= (printed[key].deviation or 0.0) for key, gap in gaps.items()) else MISSED


def in_short(paper: Paper, rows_at: Mapping[tuple[str, str, int], Iterable[Row]]) -> list[str]:
    """One line for each setting of the paper: which of its rows stand how; `rows_at` holds what was run of them."""
    lines, elsewhere = [], []
    for key, methods in paper.items():
        rows = list(rows_at.get(key, ()))
        own_draw = rows and key[1] not in SETTING_OF.values()
        heading = f"{key[0]}, {key[1]}, K = {key[2]}" + (", our own draw" if own_draw else "")
        found: dict[str, list[str]] = {name: [] for name in STANDINGS}
        moved = []
        for method, printed in methods.items():
            tried = [row for row in rows if row.method == method]
            if not tried:
                found[NOT_RUN].append(method)
                continue
            row = min(tried, key=lambda one: (*rank(one), _place(one, printed)))
            stands = standing(row, printed)
            more = [one for one in tried if work_of(one) != work_of(row)]
            better = [one for one in more if _place(one, printed) < STANDINGS.index(stands)]
            found[stands].append(_named(row, [(standing(one, printed), one) for one in better]))
            moved += _lately(row, printed, stands)
        cells = [f"all {len(own)}" if own == list(methods) else ", ".join(own) for own in found.values()]
        lines.append([heading, *cells])
        elsewhere += [f"- {heading}: {'; '.join(moved)}."] if moved else []
    if not lines:
        return []
    shown = ["## In short", "", SUMMARY, "", *table(["the paper's", *STANDINGS], lines), ""]
    return [*shown, OTHERWISE, "", *elsewhere, ""] if elsewhere else shown


def _place(row: Row, printed: Mapping[str, Printed]) -> int:
    return STANDINGS.index(standing(row, printed))


def _named(row: Row, better: Iterable[tuple[str, Row]]) -> str:
    """The method with the number of its seeds, what is not as usual, and with what else it stands better, and how."""
    own = _work_and_settings(row)
    # What else tells it from other rows of the method; K stands in the heading.
    further = {key: value for key, value in row.settings.items() if key not in (*USUAL, "method.num_clusters")}
    told = [_told(unusual(row) | further)]
    for stands, other in better:
        changed = {key: value for key, value in _work_and_settings(other).items() if value != own[key]}
        told.append(f"{stands} with {_told(changed)}{few_seeds(other)}")
    behind = "; ".join(filter(None, told))
    return row.method + few_seeds(row) + (f" ({behind})" if behind else "")


def _work_and_settings(row: Row) -> dict[str, object]:
    return {key: setting_of(row.runs[0], key) for key in USUAL}


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
