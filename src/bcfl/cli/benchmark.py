"""`bcfl benchmark`: what every method makes of federations that were divided by life."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import bcfl.cli.options as options
from bcfl.cli.command import complain
from bcfl.cli.options import flag, option, positive, usable_file, usable_folder

if TYPE_CHECKING:
    from bcfl.benchmark.campaign import Campaign


def benchmark(
    *,
    list_tasks: Annotated[bool, flag("--list", "only list the tasks and contestants")] = False,
    quick: Annotated[bool, flag("--quick", "three small tasks and a few contestants, in a minute")] = False,
    standard: Annotated[
        bool, flag("--standard", "every task and contestant once, nothing tuned (the default)")
    ] = False,
    tuned: Annotated[bool, flag("--tuned", "the same, with options chosen on validation rows, by one rule")] = False,
    newcomers: Annotated[
        bool, flag("--newcomers", "keep a fifth of the sites out, and judge how they are served")
    ] = False,
    tasks: Annotated[str | None, option("A,B,…", "only these tasks")] = None,
    methods: Annotated[str | None, option("A,B,…", "only these contestants; any method may be entered")] = None,
    models: Annotated[str, option("A,B", "linear, network or both (default)")] = "linear,network",
    draws: Annotated[str, option("0,1,2", "which of the frozen splits (default: 0)")] = "0",
    out: Annotated[
        Path, option("DIR", "where results are kept, and gone on from (default: runs/benchmark)", usable_folder)
    ] = Path("runs/benchmark"),
    report: Annotated[
        Path | None, option("FILE", "write the page of what DIR holds, and do no more", usable_file)
    ] = None,
    jobs: Annotated[int | None, option("N", "contestants side by side (default: all cores)", positive)] = None,
    quiet: options.Quiet = False,
) -> int:
    """Real federations with natural sites, each method at equal work, judged site by site.

    Nothing is downloaded: the extra `natural` brings the data. What is done already is not done again.

    examples:
      bcfl benchmark --list
      bcfl benchmark --quick
      bcfl benchmark --standard --jobs 2
      bcfl benchmark --tasks exam,radon --methods fedavg,bcfl-g,local --models linear
      bcfl benchmark --report leaderboard.html
    """
    if sum((quick, standard, tuned)) > 1:
        raise ValueError("--quick, --standard and --tuned exclude each other")
    if list_tasks:
        return _list()
    if report is not None:
        return _report(out, report)
    from bcfl.benchmark.campaign import quick as quick_campaign
    from bcfl.benchmark.campaign import work_off

    campaign = (
        quick_campaign()
        if quick
        else replace(_campaign(tasks, methods, models, draws), tune=tuned, newcomers=newcomers)
    )
    folder = out / "quick" if quick else out
    failed = work_off(campaign, folder, jobs or os.cpu_count() or 1, (lambda line: None) if quiet else print)
    _print(folder)
    for key, reason in failed.items():
        complain(f"failed: {' '.join(map(str, key[:4]))}: {reason}")
    return 1 if failed else 0


def _campaign(tasks: str | None, methods: str | None, models: str, draws: str) -> "Campaign":
    from bcfl.benchmark.campaign import Campaign
    from bcfl.benchmark.contestants import contestants_named
    from bcfl.benchmark.tasks import tasks_named

    try:
        numbers = [int(draw) for draw in draws.split(",")]
    except ValueError:
        raise ValueError(f"--draws must be whole numbers separated by commas, got {draws!r}") from None
    names = [name.strip() for name in models.split(",") if name.strip()]
    return Campaign(tasks_named(tasks), contestants_named(methods), names, numbers)


def _list() -> int:
    from rich.table import Table

    from bcfl.benchmark.contestants import CONTESTANTS
    from bcfl.benchmark.splits import frozen
    from bcfl.benchmark.tasks import all_tasks
    from bcfl.console import console_for

    console, table = console_for(), Table("task", "kind", "sites", "rows", "what", box=None)
    for name, task in all_tasks().items():
        sums = frozen()[name]
        table.add_row(name, task.kind, f"{sums['sites']} {task.sites_are}", str(sums["rows"]), task.title)
    console.print(table)
    contestants = Table("contestant", "what it is", box=None)
    for one in CONTESTANTS.values():
        contestants.add_row(one.name, one.says)
    console.print()
    console.print(contestants)
    return 0


def _print(folder: Path) -> None:
    """The table of what the folder holds: every contestant's loss on every task."""
    from rich.table import Table

    from bcfl.benchmark.leaderboard import boards
    from bcfl.benchmark.ledger import kept
    from bcfl.console import console_for

    console = console_for()
    for board in boards(kept(folder).values()):
        table = Table("contestant", *board.tasks, title=f"{board.title}: held-out loss per row", box=None)
        for row in board.rows:
            table.add_row(row.contestant, *("" if cell is None else f"{cell.loss.mean:.3f}" for cell in row.cells))
        console.print(table)


def _report(folder: Path, path: Path) -> int:
    from bcfl.benchmark.ledger import kept
    from bcfl.benchmark.page import page
    from bcfl.files import write_atomically

    records = kept(folder)
    if not records:
        raise ValueError(f"{folder} holds no results: make some by bcfl benchmark --out {folder}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(list(records.values())).encode())
    print(f"{path}: open it in any browser")
    return 0
