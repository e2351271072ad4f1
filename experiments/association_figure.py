"""Draw who is where, round by round, in one panel for each run.

python experiments/association_figure.py OUT.svg NUM_ROUNDS "CAPTION" "TITLE" RUN_FOLDER ["TITLE" RUN_FOLDER …]

docs/img/drift.svg and docs/img/clusters.svg are drawn so, from runs of drift-digits.toml and auto-digits-*.toml.
"""

from html import escape
from pathlib import Path

import torch
from runs import parser_for

from bcfl.association.hypotheses import align
from bcfl.report.reading import Run, read_run

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # of the clusters, as in the report
CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, GAP = 11, 9, 62, 40, 40


def panel(run: Run, num_rounds: int, title: str, left: int) -> list[str]:
    """One run: a row a client, a column a round; a client's changes of its true group are ringed."""
    groups = run.groups
    assert groups is not None
    # Numbered as the true groups of the round are, so that a colour means the same in all rounds and panels.
    placed = [
        align(torch.stack([torch.from_numpy(truth), own]), len(COLOURS))[1].tolist()
        for truth, own in list(zip(groups, run.placed, strict=True))[:num_rounds]
    ]
    parts = [f'<text x="{left}" y="{TOP - 14}" class="title">{escape(title)}</text>']
    cells: dict[int, list[str]] = {}  # cluster -> one path through all of its cells
    for row, client in enumerate(run.order.tolist()):
        y = TOP + row * CELL_HEIGHT
        for t, clusters in enumerate(placed):
            cell = f"M{left + t * CELL_WIDTH} {y}h{CELL_WIDTH - 1}v{CELL_HEIGHT - 1}h{1 - CELL_WIDTH}z"
            cells.setdefault(clusters[client], []).append(cell)
        changes = (groups[1:num_rounds, client] != groups[: num_rounds - 1, client]).nonzero()[0] + 1
        parts += [f'<rect x="{left + int(t) * CELL_WIDTH - 1}" y="{y - 1}" width="{CELL_WIDTH + 1}" '
                  f'height="{CELL_HEIGHT + 1}" class="ring"/>' for t in changes]  # fmt: skip
    paths = [f'<path fill="{COLOURS[cluster]}" d="{"".join(own)}"/>' for cluster, own in sorted(cells.items())]
    parts = paths + parts  # rings lie on top
    below = TOP + len(run.order) * CELL_HEIGHT + 16
    for t in (1, *range(5, len(placed) + 1, 5)):
        parts.append(f'<text x="{left + (t - 0.5) * CELL_WIDTH}" y="{below}" class="tick">{t}</text>')
    return parts


def draw(num_rounds: int, caption: str, titles: list[str], runs: list[Run]) -> str:
    """The panels side by side."""
    width = num_rounds * CELL_WIDTH
    height = TOP + runs[0].num_clients * CELL_HEIGHT + 44
    total = LEFT + len(runs) * (width + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" role="img" '
        'aria-label="The cluster of every client in every round">',
        "<style>text{font:12px sans-serif;fill:#6b7280}.title{font-weight:600;font-size:13px}.tick{text-anchor:middle;"
        "font-size:11px}.ring{fill:none;stroke:#111827;stroke-width:2}</style>",
        f'<rect width="{total}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="14" y="{TOP + 12}">client</text>',
        f'<text x="{LEFT}" y="{height - 8}">{escape(caption)}</text>',
    ]
    for position, (title, run) in enumerate(zip(titles, runs, strict=True)):
        parts += panel(run, num_rounds, title, LEFT + position * (width + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    parser = parser_for(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("num_rounds", type=int)
    parser.add_argument("caption")
    parser.add_argument("panels", nargs="+", help="a title and a run folder, by turns")
    options = parser.parse_args()
    runs = [read_run(Path(folder)) for folder in options.panels[1::2]]
    options.out.write_text(draw(options.num_rounds, options.caption, options.panels[::2], runs))
