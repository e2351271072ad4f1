"""The tasks and the results in words and tables, as a page of the documentation."""

from collections.abc import Sequence

from bcfl.benchmark.contestants import CONTESTANTS
from bcfl.benchmark.leaderboard import Board, Cell, Record, boards
from bcfl.benchmark.splits import frozen
from bcfl.benchmark.tasks import Task, all_tasks


def tasks_page() -> str:
    """A card for each task and a line for each contestant, in Markdown."""
    cards = [_card(task) for task in all_tasks().values()]
    contestants = [f"| `{one.name}` | {one.says} |" for one in CONTESTANTS.values()]
    return "\n".join([
        "# The tasks of the natural benchmark", "",
        "Made from `src/bcfl/benchmark/tasks.toml` and the checksums of data and splits beside it.", "",
        *cards, "## Contestants", "", "| name | what it is |", "|---|---|", *contestants, "",
    ])  # fmt: skip


def _card(task: Task) -> str:
    sums = frozen()[task.name]
    together = f"; rows of one `{task.person}` stay together" if task.person else ""
    return "\n".join([
        f"## {task.name}: {task.title}", "",
        f"- **Sites**: {sums['sites']} {task.sites_are} (`{task.site}`), {sums['rows']} rows{together}",
        f"- **Task**: {task.kind}, {_coded(task.target)} from {_coded(task.inputs)}; measured by the held-out loss and "
        f"by {task.measure}",
        f"- **Structure**: {task.structure}",
        f"- **Licence**: {task.licence}",
        f"- **Citation**: {task.citation}",
        f"- **Frozen**: data {sums['data']}, splits {', '.join(sums['splits'])}", "",
    ])  # fmt: skip


def _coded(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def results_tables(records: Sequence[Record]) -> str:
    """A table for each model: mean ranks, verdicts, and the loss on every task, in Markdown."""
    return "\n".join(line for board in boards(records) for line in _table(board))


def _table(board: Board) -> list[str]:
    head = ["contestant", "rank", f"better · worse · open beside `{board.reference}`", *board.tasks]
    lines = [f"### {board.title.capitalize()}", "", _line(head), _line(["---"] * len(head))]
    for row in board.rows:
        rank = "" if row.rank is None else f"{row.rank:.1f}"
        verdicts = " · ".join(str(row.verdicts(verdict)) for verdict in ("better", "worse", "open"))
        compared = "" if row.contestant == board.reference else verdicts
        lines.append(_line([f"`{row.contestant}`", rank, compared, *map(_cell, row.cells)]))
    return [*lines, ""]


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    marks = {"better": "▲", "worse": "▼", "open": ""}
    mark = marks[cell.against.verdict] if cell.against else ""
    return f"{cell.loss.mean:.3f} {mark}".strip() + (f" ({cell.failed} sites not finite)" if cell.failed else "")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
