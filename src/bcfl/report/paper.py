"""The same figures for print: matplotlib, one column wide, in any format it can write."""

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bcfl.report import require
from bcfl.report.layout import MARK_NAMES, client_graph, columns, mark_places, marks, spread, trellis
from bcfl.report.reading import Group, Run, group_runs

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
# Okabe and Ito's colours, which colour-blind readers can tell apart; the page uses the same.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C9A", "#6F7683")
DASHES = ("-", "--", ":", "-.")
MARKS: dict[str, Any] = {  # as on the page
    "birth": {"c": COLOURS[6], "marker": "^"},
    "merge": {"c": COLOURS[6], "marker": "D"},
    "death": {"c": COLOURS[6], "marker": "v"},
    "newcomer": {"c": COLOURS[2], "marker": "P"},
    "drift": {"c": COLOURS[4], "marker": "*"},
    "followed": {"facecolors": "none", "edgecolors": COLOURS[4], "marker": "*"},
}
LONGEST_LINE = 100  # characters of a legend: digits, which are wide, just fit across two panels
WHOLE_NUMBERS: Any = {"integer": True, "min_n_ticks": 1}  # ticks of what is counted, even where there is but one
WIDEST_EDGE = 4.0  # points, of a pair that always shared a cluster
STYLE: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "bcfl",  # the same figure is the same file
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


def colour(index: int) -> str:
    return "#838B9A" if index < 0 else COLOURS[index % len(COLOURS)]


def save_figures(runs: Sequence[Run], out: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Every figure of these runs in every format; details of a run are named after its method if there are several."""
    require("matplotlib")
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"--formats must be some of {', '.join(FORMATS)}, got {name!r}")
    groups = [group for group in group_runs(runs) if group.counted]
    if not groups:
        raise ValueError("no round is finished yet in these runs: there is nothing to draw")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with _style():
        for name, figure in _figures(groups):
            for kind in formats:
                path = out / f"{name}.{kind}"
                figure.savefig(path, metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
    return written


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def _figures(groups: Sequence[Group]) -> Iterator[tuple[str, "Figure"]]:
    if any(run.last("accuracy") is not None for group in groups for run in group.runs):
        yield "learning", learning(groups)
    for group in groups:
        suffix = "" if len(groups) == 1 else "-" + re.sub(r"[^\w.]+", "-", group.label)
        for name, draw in DETAILS.items():
            figure = draw(group.representative)
            if figure is not None:
                yield name + suffix, figure


def _figure(
    width: float = 3.4, height: float = 2.4, rows: int = 1, cols: int = 1, **options: Any
) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, cols, **options)


def learning(groups: Sequence[Group]) -> "Figure":
    """Accuracy and macro F1 by round: mean and one standard deviation over seeds, and below what the curves are."""
    figure, axes = _figure(6.8, 2.4, cols=2)
    for panel, key, title in zip(axes, ("accuracy", "macro_f1"), ("accuracy", "macro F1"), strict=True):
        for index, group in enumerate(groups):
            rounds, mean, deviation = group.band(partial(Run.curve, key=key))
            dash = DASHES[index // len(COLOURS) % len(DASHES)]
            panel.plot(rounds, mean, dash, color=colour(index), label=group.label_and_seeds, linewidth=1.3)
            if len(group.counted) > 1:
                panel.fill_between(rounds, mean - deviation, mean + deviation, color=colour(index), alpha=0.18, lw=0)
        panel.set(xlabel="round", ylabel=title)
        panel.locator_params("x", **WHOLE_NUMBERS)
    if len(groups) > 1 or len(groups[0].counted) > 1:
        _legend_below(figure, *axes[0].get_legend_handles_labels())
    return figure


def _legend_below(figure: "Figure", lines: Sequence["Artist"], labels: Sequence[str]) -> None:
    """A legend below all panels in as many columns as fit; the figure is higher by what it takes."""
    wrapped = [textwrap.fill(label, LONGEST_LINE) for label in labels]
    width, height = figure.get_size_inches()
    for num_columns in range(len(labels), 0, -1):
        legend = figure.legend(lines, wrapped, fontsize=7, ncols=num_columns, loc="outside lower center")
        size = legend.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        if size.width <= width or num_columns == 1:
            break
        legend.remove()
    figure.set_figheight(height + size.height)


def graph(run: Run) -> "Figure | None":
    """The client graph: edge width is the accumulated probability that two clients share a cluster."""
    if not run.clusters_clients:
        return None
    figure, axes = _figure(3.4, 3.4)
    draw_graph(axes, run)
    return figure


def draw_graph(axes: "Axes", run: Run) -> None:
    """The client graph on axes that may stand beside those of other runs."""
    from matplotlib.collections import LineCollection

    drawn = client_graph(run)
    paint = [colour(c) for c in drawn.colour_of.tolist()]
    same = drawn.colour_of[drawn.edges[:, 0]] == drawn.colour_of[drawn.edges[:, 1]]
    edge_paint = [paint[a] if s else "#838B9A" for (a, _), s in zip(drawn.edges.tolist(), same, strict=True)]
    lines = LineCollection(
        list(drawn.place[drawn.edges]), linewidths=drawn.strength * WIDEST_EDGE, colors=edge_paint, alpha=0.5
    )
    axes.add_collection(lines)
    few = len(drawn.client) <= 60
    axes.scatter(
        drawn.place[:, 0],
        drawn.place[:, 1],
        s=110 if few else 25,
        c=paint,
        edgecolors="white",
        linewidths=0.8,
        zorder=3,
    )
    if few:
        for client, (x, y) in zip(drawn.client, drawn.place, strict=True):
            axes.text(x, y, str(client), color="white", fontsize=5.5, ha="center", va="center", zorder=4)
    axes.set(xlim=(-1.12, 1.12), ylim=(1.12, -1.12), aspect="equal")
    axes.axis("off")


def association(run: Run) -> "Figure | None":
    """The probability of each cluster for each client, at up to six rounds, more of them early on."""
    if not run.clusters_clients:
        return None
    lines = columns(run)
    shown = np.unique(np.geomspace(1, len(run.stories), 6).round().astype(int)) - 1
    figure, axes = _figure(6.8, 0.5 + 0.75 * len(shown), rows=len(shown), squeeze=False, sharex=True)
    for panel, index in zip(axes[:, 0], shown, strict=True):
        image = panel.imshow(lines.mean(run.marginals[index]).T, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        panel.set_ylabel(f"round {index + 1}", rotation=0, ha="right", va="center")
        panel.set_yticks(range(run.num_clusters) if run.num_clusters <= 8 else [])
    _name_clients(axes[-1, 0], lines.labels)
    figure.colorbar(image, ax=axes, label="probability", fraction=0.03)
    return figure


def _name_clients(axes: "Axes", labels: Sequence[str]) -> None:
    shown = spread(len(labels), 20)
    axes.set_xticks(shown, [labels[i] for i in shown], fontsize=6)
    axes.set_xlabel("client")


def descent(run: Run) -> "Figure | None":
    """The hypothesis trellis: dots are hypotheses, their area the weight; crosses were pruned. Above, what happened."""
    happened = marks(run) if run.clusters_clients else []
    if not (run.clusters_clients and (run.carries_hypotheses or happened)):
        return None
    tree = trellis(run)
    figure, axes = _figure(6.8, 0.8 + 0.28 * (int(tree.rank.max()) + 1))
    for a, b in tree.edges:
        best = bool(tree.on_best_line[[a, b]].all())
        axes.plot(tree.round[[a, b]], tree.rank[[a, b]] + 1, color=COLOURS[0] if best else "#B5BBC6",
                  linewidth=1.6 if best else 0.6, zorder=2 if best else 1)  # fmt: skip
    other = ~tree.on_best_line
    for chosen, paint, marker in (
        (tree.on_best_line, COLOURS[0], "o"),
        (other & ~tree.pruned, COLOURS[5], "o"),
        (other & tree.pruned, COLOURS[1], "x"),
    ):
        axes.scatter(tree.round[chosen], tree.rank[chosen] + 1, s=4 + 40 * tree.weight[chosen], c=paint, marker=marker,
                     linewidths=0.8 if marker == "x" else 0, zorder=3)  # fmt: skip
    places = mark_places(happened)
    for kind, style in MARKS.items():
        at = [(mark.round, place) for mark, place in zip(happened, places, strict=True) if mark.kind == kind]
        if at:
            axes.scatter(*zip(*at, strict=True), s=14, zorder=4, label=MARK_NAMES[kind], **style)
    if happened:
        axes.legend(fontsize=7, ncols=len(MARKS), loc="lower left", bbox_to_anchor=(0, 1))
    axes.locator_params(**WHOLE_NUMBERS)
    axes.set(xlabel="round", ylabel="hypothesis", ylim=(tree.rank.max() + 1.6, min([0.4, *(p - 0.2 for p in places)])))
    return figure


def certainty(run: Run) -> "Figure | None":
    """The entropy of the association, and how many clients moved."""
    if not run.clusters_clients:
        return None
    figure, (above, below) = _figure(3.4, 2.8, rows=2, sharex=True, height_ratios=(2, 1))
    rounds = [record["round"] for record in run.rounds]
    above.plot(rounds, run.entropy.mean(1), color=COLOURS[0], label="mean over clients")
    above.plot(rounds, run.entropy.max(1), ":", color=COLOURS[1], label="least sure client")
    above.set_ylabel("entropy, nats")
    above.legend(fontsize=7)
    below.bar(rounds, [record["changes"] for record in run.rounds], color=COLOURS[2])
    below.set(xlabel="round", ylabel="moved")
    below.locator_params(**WHOLE_NUMBERS)
    return figure


def calibration(run: Run) -> "Figure | None":
    """The reliability diagram."""
    if run.last("calibration") is None:
        return None
    count, confidence, correct = np.asarray(run.last("calibration"), dtype=float).T
    full = count > 0
    figure, axes = _figure(2.8, 2.6)
    axes.plot([0, 1], [0, 1], "--", color="#838B9A", linewidth=0.8)
    x, y = confidence[full] / count[full], correct[full] / count[full]
    axes.plot(x, y, color=COLOURS[0], linewidth=0.8)
    axes.scatter(x, y, s=6 + 150 * count[full] / count.sum(), color=COLOURS[0], linewidths=0, clip_on=False)
    axes.set(xlabel="confidence", ylabel="share that was right", xlim=(0, 1), ylim=(0, 1))
    axes.set_title(f"ECE {run.last('ece'):.3f}", fontsize=8)
    return figure


def client_accuracy(run: Run) -> "Figure | None":
    """Each client's accuracy on its own test data."""
    if run.last("client_accuracy") is None:
        return None
    values = np.array([np.nan if v is None else v for v in run.last("client_accuracy")], dtype=float)[run.order]
    figure, axes = _figure(6.8, 2.0)
    axes.scatter(range(len(values)), values, c=[colour(int(run.colour_of[c])) for c in run.order], s=12)
    axes.axhline(run.last("accuracy"), color="#838B9A", linestyle="--", linewidth=0.8)
    axes.set_ylabel("accuracy")
    _name_clients(axes, [str(client) for client in run.order])
    return figure


def labels(run: Run) -> "Figure | None":
    """The share of each class among a client's training examples."""
    counts = run.train_labels
    if counts is None:
        return None
    lines = columns(run)
    held = np.stack([counts[members].sum(0) for members in lines.members])
    figure, axes = _figure(6.8, 2.2)
    image = axes.imshow((held / np.maximum(held.sum(1, keepdims=True), 1)).T, cmap="Blues", aspect="auto", vmin=0)
    axes.set_ylabel("class")
    _name_clients(axes, lines.labels)
    figure.colorbar(image, ax=axes, label="share", fraction=0.03)
    return figure


def work(run: Run) -> "Figure":
    """Local steps, scored examples and numbers sent in every round."""
    figure, axes = _figure(6.8, 2.0, cols=3)
    rounds = range(len(run.rounds) + 1)
    axes[0].step(rounds, run.work("parameters_down"), where="mid", color=COLOURS[0], label="down")
    axes[0].step(rounds, run.work("parameters_up"), where="mid", color=COLOURS[4], label="up")
    axes[0].legend(fontsize=7)
    axes[1].step(rounds, run.work("local_steps"), where="mid", color=COLOURS[2])
    axes[2].step(rounds, run.work("scored_examples"), where="mid", color=COLOURS[3])
    for panel, title in zip(axes, ("model numbers sent", "local steps", "scored examples"), strict=True):
        panel.set(xlabel="round", ylabel=title)
        panel.set_ylim(bottom=0)
        panel.locator_params("x", **WHOLE_NUMBERS)
    return figure


DETAILS: dict[str, Callable[[Run], "Figure | None"]] = {
    "graph": graph,
    "association": association,
    "trellis": descent,
    "certainty": certainty,
    "calibration": calibration,
    "client_accuracy": client_accuracy,
    "labels": labels,
    "work": work,
}
