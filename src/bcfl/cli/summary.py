"""What a run or a comparison has come to, as tables for people."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bcfl.cli.app import complain
from bcfl.console import console_for
from bcfl.report.reading import group_runs, read_runs
from bcfl.report.tables import said_beside, written_rows
from bcfl.runs.result import Result

QUALITIES = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "nll": "NLL",
    "ece": "calibration error",
    "ari": "agreement",
}
SHOWN_MEMBERS = 24
MANY_CLUSTERS = 50  # from so many on they say nothing one by one


def print_result(result: Result) -> None:
    """How good, who is where with what probability, what it cost."""
    console, summary = console_for(), result.summary()
    title = f"{summary['method']}, seed {summary['seed']}, {summary['rounds']} rounds"
    shown = {name: summary[key] for key, name in QUALITIES.items() if summary[key] is not None}
    figures = _table(title, [], list(shown))
    figures.add_row(*(f"{value:.3f}" for value in shown.values()))
    console.print(figures if shown else f"{title}: not tested, as no client has test data")
    if "agreement" in shown:
        told = "agreement: adjusted Rand index of the assignment with the true groups, 1 is perfect\n"
        console.print(told, style="dim")
    if (num_clusters := result.probability.shape[1]) < MANY_CLUSTERS:
        console.print(_members(result))
        if result.num_hypotheses == 1 < num_clusters:
            console.print("sure: one hypothesis was kept, so this is 1 whatever the data say\n", style="dim")
    for line in _cost(summary["work"]):
        console.print(line)
    if result.path:
        console.print(f"kept in {result.path}", soft_wrap=True)


def print_comparison(paths: Sequence[Path]) -> None:
    """Mean ± standard deviation over seeds, one row a method and combination of what else was varied."""
    groups = group_runs(read_runs(paths, complain))
    names, measures, rows = written_rows(groups)
    table = _table("mean ± sd over seeds", names, measures)
    for row in rows:
        table.add_row(*row)
    console = console_for()
    console.print(table)
    for remark in said_beside(groups):
        console.print(remark, style="dim")


def _members(result: Result) -> Table:
    """Which clients are in each cluster, and how sure that is."""
    table = Table(title="who is where", title_justify="left")
    for title in ("cluster", "clients", "sure", "members (probability if below 0.995)"):
        table.add_column(title, justify="right" if title in ("clients", "sure") else "left")
    for cluster in range(result.probability.shape[1]):
        members = (result.assignment == cluster).nonzero()[:, 0].tolist()
        if not members:
            table.add_row(str(cluster), "0", "", "")
            continue
        sure = result.probability[members, cluster]
        named = [f"{c}" if p >= 0.995 else f"{c} ({p:.2f})" for c, p in zip(members, sure.tolist(), strict=True)]
        more = f", … {len(members) - SHOWN_MEMBERS} more" if len(members) > SHOWN_MEMBERS else ""
        table.add_row(
            str(cluster), str(len(members)), f"{float(sure.mean()):.2f}", ", ".join(named[:SHOWN_MEMBERS]) + more
        )
    unseen = int((result.assignment < 0).sum())
    if unseen:
        table.add_row("none", str(unseen), "", "never took part")
    return table


def _cost(work: Mapping[str, Any]) -> list[str]:
    lines = [
        f"work: {work['trainings']:,} local trainings, {work['local_steps']:,} steps, "
        f"{work['scored_examples']:,} scored examples",
        f"traffic: {work['parameters_down']:,} model numbers down, {work['parameters_up']:,} up, "
        f"{work['scalars_up']:,} scores up, {work['exchanges']:,} exchanges",
    ]
    if "spared_examples" in work:
        in_full = work["scored_examples"] + work["spared_examples"]
        lines.append(f"racing: {work['scored_examples']:,} scored examples instead of {in_full:,}")
    if work["rejected"] or work["late"]:
        lines.append(f"left out: {work['rejected']} non-finite and {work['late']} late answers")
    return lines


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for number in numbers:
        table.add_column(number, justify="right")
    return table
