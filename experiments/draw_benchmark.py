"""Draw docs/img/natural.svg from results/benchmark/, and print the lines of the README's table."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from bcfl.benchmark.leaderboard import Board, Cell, Row, boards
from bcfl.benchmark.ledger import kept
from bcfl.files import write_atomically

ROOT = Path(__file__).parents[1]
SHOWN = {  # colours that are told apart on white, by shade too; marks for those who do not see them
    "bcfl": ("#0072b2", "●"), "bcfl-soft": ("#56b4e9", "○"), "bcfl-g": ("#d55e00", "▲"), "ifca": ("#e69f00", "△"),
    "ditto": ("#cc79a7", "◆"), "local": ("#666666", "✕"),
}  # fmt: skip
LINES = ("bcfl", "bcfl-soft", "bcfl-g", "ifca", "ditto", "fedavg", "local", "mixed-model")
BESIDE = "fedavg"
BELOW = "nats per held-out row gained over one model for all; what lies beyond is drawn at the edge"
WIDTH, LEFT, LINE, TOP, REACH = 760, 150, 26, 64, 0.25  # nats per row from the middle to an edge


def picture(board: Board) -> str:
    """For every task how much less each shown contestant loses than one model for all; right is better."""
    rows = {row.contestant: row for row in board.rows}
    names = [name for name in SHOWN if name in rows]
    bottom, middle = TOP + LINE * len(board.tasks), (LEFT + WIDTH - 20) / 2
    parts = [f'<rect width="{WIDTH}" height="{bottom + 40}" fill="#fff"/>']
    parts += [
        _text(LEFT + 100 * place, 20, f"{SHOWN[name][1]} {name}", SHOWN[name][0]) for place, name in enumerate(names)
    ]
    parts += [
        _text(_at(gain), TOP - 14, f"{gain:+.1f}" if gain else f"as {BESIDE}", "#444", "middle")
        for gain in (-0.2, -0.1, 0, 0.1, 0.2)
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
    parts.append(_text(LEFT, bottom + 24, f"{BELOW}; * planted", "#444"))
    box = f'viewBox="0 0 {WIDTH} {bottom + 40}" font-family="sans-serif"'
    title = "<title>Gain over FedAvg on every task</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{title}{"".join(parts)}</svg>\n'


def _gain(cell: Cell | None, beside: Cell | None) -> float | None:
    return None if cell is None or beside is None else beside.loss.mean - cell.loss.mean


def _at(gain: float) -> float:
    middle = (LEFT + WIDTH - 20) / 2
    return middle + (WIDTH - 20 - LEFT) / 2 * max(-1, min(1, gain / REACH))


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start", size: int = 13) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {where}>{escape(text)}</text>"


def line(row: Row) -> str:
    """A row of the README's table."""
    cells = [cell for cell in row.cells if cell is not None]
    gains = [cell.gains for cell in cells if cell.gains is not None]
    share = f"{sum(gains) / len(gains):.0%}" if gains else ""
    rank = "" if row.rank is None else f"{row.rank:.1f}"
    verdicts = " · ".join(str(row.verdicts(verdict)) for verdict in ("better", "worse", "open"))
    return f"| `{row.contestant}` | {rank} | {verdicts} | {share} |"


def main(found: Sequence[Board]) -> None:
    board = next(board for board in found if (board.model, board.tuned) == ("linear", False))
    write_atomically(ROOT / "docs" / "img" / "natural.svg", picture(board).encode())
    rows = {row.contestant: row for row in board.rows}
    for name in LINES:
        if name in rows:
            print(line(rows[name]))


if __name__ == "__main__":
    main(boards(kept(ROOT / "results" / "benchmark").values()))
