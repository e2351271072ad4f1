"""What a run or a comparison has come to, as tables for people."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bcfl.cli.command import complain
from bcfl.console import console_for
from bcfl.likelihood.measures import TITLES
from bcfl.predict.predictors import Newcomer
from bcfl.report.reading import group_runs, read_runs
from bcfl.report.tables import said_beside, written_rows
from bcfl.runs.result import Result

QUALITIES = {key: title for key, title in TITLES.items() if key not in ("brier", "crps")}
MANY = 50  # clusters: from so many on they say nothing one by one


def print_result(result: Result) -> None:
    """How good, who is where with what probability, what it cost."""
    console, summary = console_for(), result.summary()
    title = f"{summary['method']}, seed {summary['seed']}, {summary['rounds']} rounds"
    known = {
        name: summary[key] for key, name in (QUALITIES | {"ari": "agreement"}).items() if summary.get(key) is not None
    }
    figures = _table(title, [], list(known), [[f"{value:.3f}" for value in known.values()]])
    console.print(figures if known else f"{title}: not tested, as no client has test data")
    if "agreement" in known:
        console.print(
            "agreement: adjusted Rand index of the assignment with the true groups, 1 is perfect\n", style="dim"
        )
    if result.sites.names is not None and len(result.assignment) < MANY:
        titles, *rows = result.by_site().rows
        console.print(_table("site by site", titles[:1], titles[1:], rows))
    elif result.state.hypotheses.num_clusters < MANY:
        console.print(_members(result))
        if result.num_hypotheses == 1 < result.state.hypotheses.num_clusters and not result.is_placed_by_evidence:
            console.print("sure: one hypothesis was kept, so this is 1 whatever the data say\n", style="dim")
    if result.benefit is not None:
        console.print(repr(result.benefit), soft_wrap=True, highlight=False)
    for line in _cost(summary["work"]):
        console.print(line)
    if result.path:
        console.print(f"kept in {result.path}", soft_wrap=True)


def print_comparison(paths: Sequence[Path]) -> None:
    """Mean ± standard deviation over seeds, one row a method and combination of what else was varied."""
    groups = group_runs(read_runs(paths, complain))
    console = console_for()
    console.print(_table("mean ± sd over seeds", *written_rows(groups)))
    for remark in said_beside(groups):
        console.print(remark, style="dim")


def print_newcomer(newcomer: Newcomer, result: Result, name: str) -> None:
    """Where a newcomer belongs, how sure that is, and whom it resembles."""
    console, probability = console_for(), newcomer.probability.tolist()
    rows = [
        [f"{k}", f"{p:.3f}{' ◄' if k == newcomer.cluster else ''}", f"{int((result.assignment == k).sum())}"]
        for k, p in enumerate(probability)
    ]
    title = f"where {name} belongs, by {newcomer.num_examples} examples"
    console.print(_table(title, [], ["cluster", "probability", "clients of the run"], rows))
    console.print(f"entropy {newcomer.entropy:.3f} nats (0 is certain, {math.log(len(probability)):.3f} is no idea)")
    usual = result.history[-1].get("nll")
    beside = "" if usual is None else f" (the run's own clients: {usual:.3f}; far above, it may belong nowhere)"
    console.print(f"NLL per example {newcomer.nll:.3f}{beside}", soft_wrap=True)
    likely = sorted(((-p, client) for client, p in enumerate(newcomer.resembles.tolist()) if p >= 0.05))
    others = _some([f"{result.sites.name_of(client)} ({-p:.2f})" for p, client in likely], 12) or "none"
    console.print(f"shares a cluster with clients (probability): {others}", soft_wrap=True)


def print_evaluation(found: Mapping[str, Any], automatic: bool) -> None:
    """How good predictions are, of the best model and of the mixture over hypotheses."""
    titles, shares = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}, (0.5, 0.8, 0.9)
    names = {
        "point": "best model",
        "mixture": f"mixture ({found['beliefs']})",
        "own_statistics": "best, own statistics",
    }
    rows = []
    for key in (key for key in names if key in found):
        part = found[key]
        curve = dict(zip(part["coverage"], part["accuracy_at_coverage"], strict=True))
        rows.append([names[key], *(f"{part[k]:.4f}" for k in titles), *(f"{curve[share]:.4f}" for share in shares)])
    numbers = [*titles.values(), *(f"accuracy on the surest {share:.0%}" for share in shares)]
    console = console_for()
    console.print(_table(f"{found['method']}, seed {found['seed']}: predictions as probabilities", [""], numbers, rows))
    if found["beliefs"] != "mean":
        chosen = " (chosen on validation data)" if automatic else ""
        console.print(f"prior precision {found['prior_precision']}{chosen}")


def _members(result: Result) -> Table:
    """Which clients are in each cluster, and how sure that is."""
    rows, probability = [], result.probability
    for cluster in range(result.state.hypotheses.num_clusters):
        members = (result.assignment == cluster).nonzero()[:, 0].tolist()
        sure = probability[members, cluster]
        called = map(result.sites.name_of, members)
        named = [f"{c}" if p >= 0.995 else f"{c} ({p:.2f})" for c, p in zip(called, sure.tolist(), strict=True)]
        rows.append([f"{cluster}", _some(named, 24), f"{len(members)}", f"{float(sure.mean()):.2f}" if members else ""])
    if unseen := int((result.assignment < 0).sum()):
        rows.append(["none", "never took part", f"{unseen}", ""])
    return _table("who is where", ["cluster", "members (probability if below 0.995)"], ["clients", "sure"], rows)


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


def _some(texts: Sequence[str], most: int) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(texts[:most]) + (f", … {len(texts) - most} more" if len(texts) > most else "")


def _table(title: str, names: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate([*names, *numbers]):
        table.add_column(column, justify="left" if index < len(names) else "right")
    for row in rows:
        table.add_row(*row)
    return table
