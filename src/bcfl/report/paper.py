"""The figures for print: `charts.py` says what they show, matplotlib draws it, in any format it can write."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bcfl.report import charts, require
from bcfl.report.charts import Chart, Heat, Panel, Series, slug
from bcfl.report.drawing import client_graph, spread
from bcfl.report.reading import Group, Run, group_runs

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
# Okabe and Ito's colours, which colour-blind readers can tell apart; the page uses the same.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B4C9A", "#6F7683")
DARK = (0, 6, 7)  # those on which white can be read
GREY = "#838B9A"
DASHES = ("-", "--", ":", "-.")
MARKERS = {"●": "o", "✕": "x", "▲": "^", "◆": "D", "▼": "v", "✚": "P", "★": "*", "☆": "*"}
LONGEST_LINE = 100  # characters of a legend: digits, which are wide, just fit across two panels
WHOLE_NUMBERS: Any = {"integer": True, "min_n_ticks": 1}  # ticks of what is counted, even where there is but one
WIDEST_EDGE = 4.0  # points, of a pair that always shared a cluster
MOST_FRAMES = 6  # of a heat map that changes by round, more of them early on
PRINTED = 0.62  # of a size or width on the page
SIZES = {"certainty": (3.4, 2.8), "calibration": (2.8, 2.6), "work": (6.8, 2.0), "learning": (6.8, 2.4)}
WIDE = (6.8, 2.2)
SIDE_BY_SIDE = ("work", "learning")
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
    return GREY if index < 0 else COLOURS[index % len(COLOURS)]


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
        suffix, run = "" if len(groups) == 1 else "-" + slug(group.label), group.representative
        if run.clusters_clients:
            yield "graph" + suffix, graph(run)
        for name, chart in charts.of_run(run, _early_rounds(run)).items():
            yield name + suffix, drawn(name, chart)


def _early_rounds(run: Run) -> Any:
    return np.unique(np.geomspace(1, len(run.rounds), MOST_FRAMES).round().astype(int)) - 1


def learning(groups: Sequence[Group]) -> "Figure":
    """Accuracy and macro F1 by round: mean and one standard deviation over seeds, and below what the curves are."""
    both = [*charts.by_round(groups, "accuracy", "accuracy"), *charts.by_round(groups, "macro_f1", "macro F1")]
    named = len(groups) > 1 or len(groups[0].counted) > 1
    return drawn("learning", both, legend_below=named)


def drawn(name: str, chart: Chart, legend_below: bool = False) -> "Figure":
    """A chart as a figure: its panels above one another or side by side, heat maps a strip for each round."""
    first = chart[0]
    if isinstance(first, Heat):
        return _heat_figure(first)
    tallest = len({y for series in first.series for y in series.y if series.kind == "dots"})
    size = (6.8, 0.8 + 0.28 * tallest) if name == "trellis" else SIZES.get(name, WIDE)
    across = len(chart) if name in SIDE_BY_SIDE else 1
    heights = [2.0, *[1.0] * (len(chart) - 1)] if across == 1 else None
    figure, axes = _figure(size, len(chart) // across, across, height_ratios=heights, sharex=across == 1)
    for place, panel in zip(axes.flat, chart, strict=True):
        assert isinstance(panel, Panel)
        _draw_panel(place, panel)
        _, names = place.get_legend_handles_labels()
        if len(names) > 1 and not legend_below:
            above: Any = {"ncols": len(names), "loc": "lower left", "bbox_to_anchor": (0, 1), "columnspacing": 1}
            place.legend(fontsize=7, handletextpad=0.3, **(above if across == 1 else {}))
    for place in axes.flat[: -1 if across == 1 else 0]:
        place.set_xlabel("")  # said below
    if legend_below:
        _legend_below(figure, *axes.flat[0].get_legend_handles_labels())
    return figure


def _figure(size: tuple[float, float], rows: int = 1, cols: int = 1, **options: Any) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, cols, squeeze=False, **options)


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    for layer, series in enumerate(panel.series, 1):
        _draw_series(axes, series, layer)
    if panel.level is not None:
        axes.axhline(panel.level, color=GREY, linestyle="--", linewidth=0.8)
    axes.set(xlabel=panel.x, ylabel=panel.y, xlim=panel.x_range, ylim=panel.y_range)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if panel.names is not None:
        _name_clients(axes, panel.names)
    elif panel.whole:
        axes.locator_params("x", **WHOLE_NUMBERS)
    if panel.counts:
        axes.locator_params("y", **WHOLE_NUMBERS)


def _draw_series(axes: "Axes", series: Series, layer: int) -> None:
    label = series.name or None
    if series.kind == "dots":
        return _draw_dots(axes, series, layer, label)
    assert isinstance(series.colour, int)
    look: Any = {"color": colour(series.colour), "label": label, "zorder": layer}
    width = series.width * PRINTED
    if series.kind == "bars":
        axes.bar(series.x, series.y, **look)
    elif series.kind == "steps":
        axes.step(series.x, series.y, where="mid", linewidth=width, **look)
    elif series.kind == "links":
        axes.plot(np.transpose(series.x), np.transpose(series.y), linewidth=width, **look)
    else:
        axes.plot(series.x, series.y, DASHES[series.dash % len(DASHES)], linewidth=width, **look)
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=look["color"], alpha=0.18, lw=0)
    return None


def _draw_dots(axes: "Axes", series: Series, layer: int, label: str | None) -> None:
    paint = [colour(c) for c in series.colour] if isinstance(series.colour, list) else colour(series.colour)
    area = (np.array(series.size) * PRINTED) ** 2
    if series.low is not None and series.high is not None:
        axes.vlines(series.x, series.low, series.high, color=GREY, alpha=0.5, linewidth=0.6)
    look: Any = {"edgecolors": paint, "facecolors": "none"} if series.sign == "☆" else {"c": paint}
    thin = series.sign in "✕☆"
    axes.scatter(series.x, series.y, s=area, marker=MARKERS[series.sign], linewidths=0.8 if thin else 0, label=label,
                 zorder=layer + 1, clip_on=False, **look)  # fmt: skip


def _legend_below(figure: "Figure", lines: Sequence["Artist"], names: Sequence[str]) -> None:
    """A legend below all panels in as many columns as fit; the figure is higher by what it takes."""
    wrapped = [textwrap.fill(name, LONGEST_LINE) for name in names]
    width, height = figure.get_size_inches()
    for num_columns in range(len(names), 0, -1):
        legend = figure.legend(lines, wrapped, fontsize=7, ncols=num_columns, loc="outside lower center")
        size = legend.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        if size.width <= width or num_columns == 1:
            break
        legend.remove()
    figure.set_figheight(height + size.height)


def _heat_figure(heat: Heat) -> "Figure":
    several = len(heat.frames) > 1
    size = (6.8, 0.5 + 0.75 * len(heat.frames)) if several else WIDE
    figure, axes = _figure(size, len(heat.frames), sharex=True)
    for place, frame, index in zip(axes[:, 0], heat.frames, heat.rounds, strict=True):
        image = place.imshow(frame, vmin=0, vmax=heat.most, cmap="Blues", aspect="auto")
        if several:
            place.set_ylabel(f"round {index}", rotation=0, ha="right", va="center")
            place.set_yticks(range(len(heat.rows)) if len(heat.rows) <= 8 else [])
        else:
            place.set_ylabel(heat.y)
    _name_clients(axes[-1, 0], heat.names)
    figure.colorbar(image, ax=axes, label=heat.label, fraction=0.03)
    return figure


def _name_clients(axes: "Axes", names: Sequence[str]) -> None:
    shown = spread(len(names), 20)
    axes.set_xticks(shown, [names[i] for i in shown], fontsize=6)
    axes.set_xlabel("client")


def graph(run: Run) -> "Figure":
    """The client graph: edge width is the accumulated probability that two clients share a cluster."""
    figure, axes = _figure((3.4, 3.4))
    draw_graph(axes[0, 0], run)
    return figure


def draw_graph(axes: "Axes", run: Run) -> None:
    """The client graph on axes that may stand beside those of other runs."""
    from matplotlib.collections import LineCollection

    laid = client_graph(run)
    paint = [colour(c) for c in laid.colour_of.tolist()]
    same = laid.colour_of[laid.edges[:, 0]] == laid.colour_of[laid.edges[:, 1]]
    edge_paint = [paint[a] if s else GREY for (a, _), s in zip(laid.edges.tolist(), same, strict=True)]
    widths = laid.strength * WIDEST_EDGE
    axes.add_collection(LineCollection(list(laid.place[laid.edges]), linewidths=widths, colors=edge_paint, alpha=0.5))
    few = len(laid.client) <= 60
    look: Any = {"edgecolors": "white", "linewidths": 0.8, "zorder": 3}
    axes.scatter(laid.place[:, 0], laid.place[:, 1], s=110 if few else 25, c=paint, **look)
    for client, (x, y), c in zip(laid.client, laid.place, laid.colour_of.tolist(), strict=True) if few else ():
        ink = "white" if c >= 0 and c % len(COLOURS) in DARK else "black"
        axes.text(x, y, str(client), color=ink, fontsize=5.5, ha="center", va="center", zorder=4)
    axes.set(xlim=(-1.12, 1.12), ylim=(1.12, -1.12), aspect="equal")
    axes.axis("off")
