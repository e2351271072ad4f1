"""The tables of what goes beyond the paper: how many clusters, drift, predictions with their uncertainty, newcomers."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from measured import Paper, Record, Row, by_problem, is_drift, main_clusters, rows_of, setting_of, with_clusters
from tables import interval, show, table

Predicted = Sequence[Mapping[str, Any]]  # what results/predictive/*.json hold

KNOWS_NOTHING = "bcfl-auto"
BESIDE = ("bcfl-g", "bcfl-mh-6-w")  # told K
SIZES = (1, 2, 4, 8, 16, 32, 64)  # examples of a newcomer
TEMPERATURE = "n^0"  # the default: likelihoods as they are


def beyond(records: Sequence[Record], paper: Paper, predicted: Predicted, newcomers: Predicted) -> list[str]:
    """All of it, in Markdown."""
    settled = [record for record in records if not is_drift(record)]
    parts = [how_many(settled, paper), drift([record for record in records if is_drift(record)])]
    return [line for part in (*parts, uncertainty(predicted), placed(newcomers)) for line in part]


def how_many(records: Iterable[Record], paper: Paper) -> list[str]:
    """bcfl-auto, which is not told K, beside methods that are told the right one; work as a ratio to BCFL-G's."""
    shown = (KNOWS_NOTHING, *BESIDE)
    in_full = [record for record in records if not setting_of(record, "method.racing")]  # or scorings do not compare
    lines = []
    for problem, own in sorted(by_problem(one for one in in_full if one["result"]["method"] in shown).items()):
        rows = rows_of(with_clusters(own, main_clusters(problem, own, paper)))
        if not any(row.method == KNOWS_NOTHING for row in rows):
            continue
        yardstick = next((row for row in rows if row.method == BESIDE[0]), None)
        for row in sorted(rows, key=lambda row: shown.index(row.method)):
            lines.append([", ".join(problem), row.label, _numbers_found(row), show(row.finals("ari"))])
            lines[-1] += [show(row.finals(key)) for key in ("accuracy", "macro_f1")]
            lines[-1] += [_ratio(row, yardstick, key) for key in ("local_steps", "scored_examples")]
            lines[-1] += [str(row.runs[0]["result"]["rounds"]), str(len(row.runs))]
    columns = ["data", "method", "clusters found", "agreement", "accuracy", "macro F1", "steps ÷ BCFL-G's"]
    columns += ["scorings ÷ BCFL-G's", "rounds", "seeds"]
    note = "bcfl-auto starts from one cluster and is not told their number; the others are (docs/how-many-clusters.md)."
    return ["## Beyond the paper: how many clusters", "", note, "", *table(columns, lines), ""] if lines else []


def _numbers_found(row: Row) -> str:
    found = Counter(len({cluster for cluster in run["result"]["assignment"] if cluster >= 0}) for run in row.runs)
    return ", ".join(f"{number} in {times} of {len(row.runs)}" for number, times in sorted(found.items()))


def _ratio(row: Row, yardstick: Row | None, key: str) -> str:
    if yardstick is None or row.runs[0]["result"]["rounds"] != yardstick.runs[0]["result"]["rounds"]:
        return ""
    return f"{row.spent(key)[-1] / yardstick.spent(key)[-1]:.2f}"


def drift(records: Iterable[Record]) -> list[str]:
    """Clients that change group in mid-run, with and without a memory."""
    lines = []
    for problem, own in sorted(by_problem(one for one in records if "drift" in one["result"]).items()):
        for row in sorted(rows_of(own), key=lambda row: row.label):
            told = [run["result"]["drift"] for run in row.runs]
            again, changed = sum(run["found_again"] for run in told), sum(run["changed"] for run in told)
            cells = [
                _known([run[key] for run in told], scale)
                for key, scale in (("false_switches", 100), ("rounds_until_found", 1))
            ]
            cells += [f"{again} of {changed}", show(row.finals("ari")), show(row.finals("accuracy"))]
            lines.append([", ".join(problem), row.label, *cells, str(len(row.runs))])
    columns = ["data", "method", "false switches, % per client and round", "rounds until found (median)"]
    columns += ["found again", "agreement at the end", "accuracy", "seeds"]
    note = "Clients change group in mid-run; `stay` is the memory of associations (docs/drift.md)."
    return ["## Beyond the paper: drift", "", note, "", *table(columns, lines), ""] if lines else []


def _known(values: Sequence[float | None], scale: float) -> str:
    """Mean and deviation of those that there are, and of how many they are, if not of all."""
    known = [scale * value for value in values if value is not None]
    told = show(known) if known else "none"
    return told if len(known) == len(values) else f"{told} ({len(known)} of {len(values)} seeds)"


def uncertainty(records: Predicted) -> list[str]:
    """The predictive mixture minus each client's best model, with confidence intervals over seeds."""
    rows: dict[tuple[str, int, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        rows[record["data"], record["rounds"], record["method"], record["beliefs"]].append(record)
    lines = []
    for (data, rounds, method, beliefs), runs in sorted(rows.items()):
        best = [f"{fmean(run['point'][key] for run in runs):.4f}" for key in ("nll", "ece")]
        change = [
            interval([run["mixture"][key] - run["point"][key] for run in runs])
            for key in ("nll", "ece", "brier", "accuracy")
        ]
        lines.append([f"{data}, {rounds} rounds", method, beliefs, *best, *change, str(len(runs))])
    columns = ["data", "method", "beliefs", "NLL, best model", "ECE, best model", "Δ NLL", "Δ ECE", "Δ Brier"]
    columns += ["Δ accuracy", "seeds"]
    if not lines:
        return []
    note = (
        "Each client's predictive mixture minus its best model, on test data, with 95 % confidence intervals over "
        "seeds (Student's t); below zero is better, but for accuracy (docs/uncertainty.md)."
    )
    return ["## Beyond the paper: predictions with their uncertainty", "", note, "", *table(columns, lines), ""]


def placed(records: Predicted) -> list[str]:
    """How often a newcomer is placed with its true group, and how sure it is said to be, by its number of examples."""
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        seen = "" if record["held_out"] else " (clients of the run)"
        rows[record["data"] + seen, record["method"]].append(record)
    lines = []
    for (data, method), runs in sorted(rows.items()):
        for key, title in (("accuracy", "placed rightly"), ("confidence", "stated"), ("ece", "calibration error")):
            cells = [_of_newcomers(runs, key, size) for size in SIZES]
            lines.append([data, method, title, *cells, str(len(runs))])
        for key, title in (("nll", "Δ NLL of predictions"), ("ece", "Δ ECE of predictions")):
            cells = [_gained(runs, key, size) for size in SIZES]
            lines.append([data, method, title, *cells, str(len(runs))])
    if not lines:
        return []
    columns = ["data", "method", "", *(f"n = {size}" for size in SIZES), "seeds"]
    note = (
        "Newcomers placed by scoring n of their examples; means over seeds (docs/newcomers.md). Δ is the mixture over "
        "where a newcomer may belong minus the single most likely model, on its other examples, with a 95 % "
        "confidence interval over seeds; below zero is better (docs/uncertainty.md)."
    )
    return ["## Beyond the paper: newcomers", "", note, "", *table(columns, lines), ""]


def _gained(runs: Sequence[Mapping[str, Any]], key: str, size: int) -> str:
    own = [
        row[f"mixture_{key}"] - row[f"best_{key}"]
        for run in runs
        for row in run["predictions"]
        if row["examples"] == size
    ]
    return interval(own) if own else ""


def _of_newcomers(runs: Sequence[Mapping[str, Any]], key: str, size: int) -> str:
    own = [
        row[key] for run in runs for row in run["table"] if (row["examples"], row["temperature"]) == (size, TEMPERATURE)
    ]
    return f"{fmean(own):.3f}" if own else ""
