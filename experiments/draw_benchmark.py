"""Draw docs/img/natural.svg from results/benchmark/, and print the lines of the README's table."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bcfl.benchmark.contestants import CONTESTANTS
from bcfl.benchmark.leaderboard import Board, Cell, Record, Row, boards
from bcfl.benchmark.ledger import kept
from bcfl.benchmark.tasks import all_tasks
from bcfl.files import write_atomically

ROOT = Path(__file__).parents[1]
SHOWN = {  # colours that are told apart on white, by shade too; marks for those who do not see them
    "bcfl": ("#0072b2", "●"), "bcfl-soft": ("#56b4e9", "○"), "bcfl-g": ("#d55e00", "▲"), "local": ("#666666", "✕"),
    "mixed-model": ("#009e73", "◆"),
}  # fmt: skip
LINES = ("bcfl", "bcfl-soft", "bcfl-g", "fedavg", "local", "mixed-model")
BESIDE = "fedavg"
BELOW = "nats per held-out row gained over one model for all; what lies beyond is at the edge"
WIDTH, LEFT, LINE, TOP = 760, 150, 26, 64
REACH, FINE = 1.5, 0.02  # nats per row from the middle to an edge; up to FINE the scale is even, then logarithmic


def picture(board: Board) -> str:
    """For every task how much less each shown contestant loses than one model for all; right is better."""
    rows = {row.contestant: row for row in board.rows}
    names = [name for name in SHOWN if name in rows]
    bottom, middle = TOP + LINE * len(board.tasks), (LEFT + WIDTH - 20) / 2
    parts = [f'<rect width="{WIDTH}" height="{bottom + 40}" fill="#fff"/>']
    parts += [
        _text(LEFT + 115 * place, 20, f"{SHOWN[name][1]} {name}", SHOWN[name][0]) for place, name in enumerate(names)
    ]
    parts += [
        _text(_at(gain), TOP - 14, f"{gain:+g}" if gain else BESIDE, "#444", "middle")
        for gain in (-1, -0.3, -0.1, -0.02, 0, 0.02, 0.1, 0.3, 1)
    ]
    parts.append(f'<line x1="{middle}" x2="{middle}" y1="{TOP - 6}" y2="{bottom}" stroke="#999"/>')
    for place, task in enumerate(board.tasks):
        y = TOP + LINE * place + LINE / 2
        title = f"{task} *" if board.task(task).control else task
        parts.append(_text(LEFT - 10, y + 4, title, "#111", "end"))
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y}" y2="{y}" stroke="#eee"/>')
        for name in names:
            gain = _gain(rows[name].cells[place], rows[BESIDE].cells[place])
            if gain is not None:
                parts.append(_text(_at(gain), y + 5, SHOWN[name][1], SHOWN[name][0], "middle", 15))
    parts.append(_text(WIDTH - 20, bottom + 24, f"{BELOW}; * planted", "#444", "end"))
    box = f'viewBox="0 0 {WIDTH} {bottom + 40}" font-family="sans-serif"'
    title = "<title>Gain over FedAvg on every task</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{title}{"".join(parts)}</svg>\n'


def _gain(cell: Cell | None, beside: Cell | None) -> float | None:
    return None if cell is None or beside is None else beside.loss.mean - cell.loss.mean


def _at(gain: float) -> float:
    middle = (LEFT + WIDTH - 20) / 2
    share = math.copysign(math.log1p(abs(gain) / FINE) / math.log1p(REACH / FINE), gain)
    return middle + (WIDTH - 20 - LEFT) / 2 * max(-1, min(1, share))


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start", size: int = 13) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {where}>{escape(text)}</text>"


def line(row: Row) -> str:
    """A row of the README's table: mean rank, how the default stands to it, how many sites gain over being alone."""
    gains = [cell.gains for cell in row.cells if cell is not None and cell.gains is not None]
    share = f"{sum(gains) / len(gains):.0%}" if gains else ""
    rank = "" if row.rank is None else f"{row.rank:.1f}"
    turned = " · ".join(str(row.verdicts(verdict)) for verdict in ("worse", "better", "open"))
    return f"| `{row.contestant}` | {rank} | {'' if row.contestant == LINES[0] else turned} | {share} |"


def complete(records: Sequence[Record]) -> list[Record]:
    """The records with a linear model, untuned, of tasks that all of the table's contestants have done."""
    plain = [one for one in records if one["model"] == "linear" and not one["tuned"] and not one["newcomers"]]
    done: dict[str, set[str]] = {}
    for one in plain:
        done.setdefault(one["task"], set()).add(one["contestant"])
    wanted = {
        name: {one for one in LINES if CONTESTANTS[one].takes(task, "linear")} for name, task in all_tasks().items()
    }
    return [one for one in plain if one["contestant"] in LINES and wanted[one["task"]] <= done[one["task"]]]


def main(records: Sequence[Record]) -> None:
    (board,) = boards(complete(records))
    write_atomically(ROOT / "docs" / "img" / "natural.svg", picture(board).encode())
    print(f"{len(board.tasks)} tasks, ranks over {board.ranked_tasks} natural ones: {', '.join(board.tasks)}")
    for row in board.rows:
        print(line(row))


if __name__ == "__main__":
    main(list(kept(ROOT / "results" / "benchmark").values()))
