"""The leaderboard as one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bcfl.benchmark.contestants import ALONE, CONTESTANTS
from bcfl.benchmark.leaderboard import Board, Cell, Record, boards, losses_of
from bcfl.benchmark.pictures import differences_picture, gains_picture, ranks_picture
from bcfl.benchmark.splits import frozen
from bcfl.benchmark.tasks import Task, all_tasks


@dataclass(frozen=True)
class Card:
    """All that is told of one task."""

    task: Task
    sites: int
    rows: int
    best: tuple[str, ...]  # contestant and model, by loss, the best first; at most three
    pictures: tuple[tuple[str, str], ...]  # each with what it shows


def page(records: Sequence[Record]) -> str:
    """Tables, pictures and a card for each task, of these results."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = boards(records)
    loader = PackageLoader("bcfl.benchmark", ".")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return pages.get_template("page.html").render(
        boards=[(board, ranks_picture(board)) for board in found],
        cards=cards(records, found),
        kinds=list(dict.fromkeys(task.kind for task in all_tasks().values())),
        tasks=all_tasks(),
        says={name: one.says for name, one in CONTESTANTS.items()},
        setting=records[0]["setting"],
        said=said,
    )


def cards(records: Sequence[Record], found: Sequence[Board]) -> list[Card]:
    """A card for each task that there are results of."""
    present = {record["task"] for record in records}
    return [_card(task, records, found) for name, task in all_tasks().items() if name in present]


def _card(task: Task, records: Sequence[Record], found: Sequence[Board]) -> Card:
    standing = sorted(
        (cell.loss.mean, f"{row.contestant}, {board.title}")
        for board, row, cell in _cells(task, found) if not cell.failed
    )  # fmt: skip
    sums: Mapping[str, Any] = frozen()[task.name]
    best = tuple(f"{name} ({loss:.3f})" for loss, name in standing[:3])
    pictures = tuple((svg, shown) for svg, shown in _pictures(task, records, found) if svg)
    return Card(task, sums["sites"], sums["rows"], best, pictures)


def _cells(task: Task, found: Sequence[Board]) -> list[tuple[Board, Any, Cell]]:
    places = [(board, board.tasks.index(task.name)) for board in found if task.name in board.tasks]
    return [(board, row, cell) for board, place in places for row in board.rows if (cell := row.cells[place])]


def _pictures(task: Task, records: Sequence[Record], found: Sequence[Board]) -> list[tuple[str, str]]:
    """How the others stand to the reference, and what each site gains by it over being alone, by size."""
    board = next((board for board in found if task.name in board.tasks), None)
    if board is None:
        return []
    place = board.tasks.index(task.name)
    against = {
        row.contestant: (cell.against.mean, cell.against.low, cell.against.high)
        for row in board.rows if (cell := row.cells[place]) is not None and cell.against is not None
    }  # fmt: skip
    of = {
        name: [record for record in records if (record["task"], record["contestant"]) == (task.name, name)
               and (record["model"], record["tuned"], record["newcomers"])
               == (board.model, board.tuned, board.newcomers)]
        for name in (ALONE, board.reference)
    }  # fmt: skip
    gains = ""
    if all(of.values()) and len(of[ALONE]) == len(of[board.reference]):
        pairs = zip(losses_of(of[ALONE]), losses_of(of[board.reference]), strict=True)
        gained = [None if None in pair else pair[0] - pair[1] for pair in pairs]  # type: ignore[operator]
        gains = gains_picture(of[ALONE][0]["rows"], gained, f"being alone, by {board.reference}")
    compared = differences_picture(list(against), against, board.reference)
    return [
        (
            compared,
            f"Loss beside that of {board.reference}, {board.title}, with 95 % intervals over sites: left is better",
        ),
        (gains, f"What each site gains by {board.reference} over being alone, in nats per row, by its training rows"),
    ]


def said(cell: Cell | None) -> str:
    """A cell in words, for whoever points at it."""
    if cell is None:
        return "not run"
    parts = [f"95 % over sites: {cell.loss.low:.3f} to {cell.loss.high:.3f}", f"worst tenth of sites {cell.worst:.3f}"]
    if cell.gains is not None:
        parts.append(f"{cell.gains:.0%} of sites gain over being alone")
    if cell.against is not None:
        parts.append(f"difference {cell.against.mean:+.4f} ({cell.against.low:+.4f} to {cell.against.high:+.4f})")
    parts += [f"{name} {value:.3f}" for name, value in cell.calibration.items() if value is not None]
    parts.append(f"{cell.seconds:.1f} s, {cell.local_steps or 0:,} local steps, {cell.megabytes:.1f} MB")
    return "; ".join(parts)
