"""The pictures of RESULTS.md, of what the paper draws, too: learning curves and client graphs.

The curves are drawn whenever collect.py writes the page. The graphs need whole runs:
python experiments/draw_results.py NAME RUNS_FOLDER   one for each method in it, all of them in docs/img/graphs-NAME.svg
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from measured import (
    ENOUGH_SEEDS,
    MEASURES,
    Printed,
    Row,
    paper_numbers,
    read_paper,
    read_records,
    rows_by_setting,
    settings_of,
    tested_problems,
)
from results_page import RAISED, stands_for
from runs import finished, parser_for

from bcfl.report.paper import COLOURS, DASHES, STYLE, draw_graph
from bcfl.report.reading import group_runs, read_runs

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("fedavg", "wecfl", "bcfl-g", "bcfl-c-3", "bcfl-mh-3", "bcfl-mh-6")
WARMED = SHOWN[2:]
COLOUR_OF = dict(zip(SHOWN, COLOURS, strict=False))
DASH_OF = dict(zip(("bp-fedavg", "fedamp", "fesem", "fedsoft"), DASHES, strict=True))  # of the others, in grey
GREY = "#9CA3AF"
FIRST = 20  # the round at which curves begin: those before it would press all else together
PAPERS_PLACE = 104  # of its last figure, right of the last round
ACROSS = 3  # client graphs side by side


def draw_curves(rows: Mapping[str, Row], printed: Mapping[str, Mapping[str, Printed]], path: Path) -> None:
    """Accuracy and macro F1 by round: above all methods without warm-up, below BCFL without it and with it."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained", sharex=True)
    for (above, below), (key, title) in zip(panels.T, MEASURES.items(), strict=True):
        for method in (*DASH_OF, *SHOWN):
            _curve(above, rows[method], key, printed[method][key], band=True)
        for method in WARMED:
            _curve(below, rows[method], key, printed[method][key])
            _curve(below, rows[f"{method}-w"], key, printed[f"{method}-w"][key])
        above.set_title(f"{title}, percent", loc="left")
        below.set_title("without warm-up, and with it (dashed)", loc="left")
        below.set_xlabel("round")
    for panel in panels[:, 1]:
        panel.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _curve(panel: Any, row: Row, key: str, papers: Printed, band: bool = False) -> None:
    """A row's mean over seeds by round, perhaps with one standard deviation to both sides, and the paper's figure."""
    method = row.method.removesuffix("-w")
    paint, warmed = COLOUR_OF.get(method, GREY), method != row.method
    dash = "--" if warmed else DASH_OF.get(method, "-")
    curves = 100 * np.array([run["by_round"][key] for run in row.runs])[:, FIRST - 1 :]  # (seed, round)
    rounds, mean = np.arange(FIRST, FIRST + curves.shape[1]), curves.mean(0)
    panel.plot(rounds, mean, dash, color=paint, linewidth=1.2, label=_label(row))
    if band and len(curves) > 1:
        spread = curves.std(0, ddof=1)
        panel.fill_between(rounds, mean - spread, mean + spread, color=paint, alpha=0.15, linewidth=0)
    if method in COLOUR_OF:
        panel.plot(PAPERS_PLACE, papers.value, "D", color=paint, markersize=4, fillstyle="none" if warmed else "full")


def _label(row: Row) -> str:
    return row.method + (str(len(row.runs)).translate(RAISED) if len(row.runs) < ENOUGH_SEEDS else "")


def draw_graphs(folder: Path, path: Path) -> None:
    """A client graph for each method that was run: who shared a cluster with whom, over all rounds."""
    runs = [group.representative for group in group_runs(read_runs(finished(folder)))]
    across = min(len(runs), ACROSS)
    rows = -(-len(runs) // across)
    figure, panels = plt.subplots(rows, across, figsize=(3 * across, 3.3 * rows), layout="constrained", squeeze=False)
    for panel in panels.flat:
        panel.axis("off")
    for panel, run in zip(panels.flat, runs, strict=False):
        draw_graph(panel, run)
        panel.set_title(f"{run.config['data']['name']}: {run.method}", loc="left", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_table1(root: Path) -> None:
    """The curves of every setting of table 1 of which all rows were run."""
    paper_rows = read_paper(root)
    paper = paper_numbers(paper_rows)
    rows_at = rows_by_setting(tested_problems(read_records(root)), paper)
    for key in settings_of(paper_rows, "table1"):
        rows = {method: row for method in paper[key] if (row := stands_for(method, rows_at.get(key, ())))}
        if len(rows) == len(paper[key]):
            with plt.rc_context(STYLE):
                draw_curves(rows, paper[key], root / f"docs/img/curves-{key[0]}.svg")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("name", help="what the picture is called")
    parser.add_argument("runs_folder", type=Path, help="a folder of runs, as `bcfl sweep --out` leaves it")
    options = parser.parse_args()
    with plt.rc_context(STYLE):
        draw_graphs(options.runs_folder, ROOT / f"docs/img/graphs-{options.name}.svg")


if __name__ == "__main__":
    main()
