"""The page's interactive figures as plain Plotly dictionaries.

Colours are names of the page's CSS variables ("--c0", or "--c0/0.2" for a fifth of its opacity): the page puts in
what the reader's light or dark mode asks for.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bcfl.report.layout import KINDS_OF_MARK, MARK_NAMES, Columns, Mark, mark_places, marks, spread, trellis
from bcfl.report.reading import Floats, Group, Run

Figure = dict[str, Any]
NUM_COLOURS = 8
DASHES = ("solid", "dash", "dot", "dashdot")
# Kind of mark -> its colour and symbol: one colour for what clusters do, others for clients.
MARKS = {
    "birth": ("--c6", "triangle-up"),
    "merge": ("--c6", "diamond"),
    "death": ("--c6", "triangle-down"),
    "newcomer": ("--c2", "cross"),
    "drift": ("--c4", "star"),
    "followed": ("--c4", "star-open"),
}
HEAT = [[0, "--heat0"], [0.5, "--heat1"], [1, "--heat2"]]


def colour(index: int) -> str:
    return "--muted" if index < 0 else f"--c{index % NUM_COLOURS}"


def rounded(values: Any, digits: int = 4) -> Any:
    """Plain numbers with only the digits that can be seen: the page stays small."""
    return np.round(np.asarray(values, dtype=float), digits).tolist()


def by_round(groups: Sequence[Group], key: str, title: str) -> Figure:
    """A metric by round: one line a group, with a band of one standard deviation where there are several seeds."""
    traces: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        rounds, mean, spread = group.band(lambda run: run.curve(key))
        traces += _line_with_band(index, group, rounds.tolist(), mean, spread, "round %{x}")
    layout = _round_axes(max((x for trace in traces for x in trace["x"]), default=0), title, legend=len(groups) > 1)
    if all(len(set(trace["x"])) == 1 for trace in traces):  # or the axis would reach from one below to one above
        layout["yaxis"]["rangemode"] = "tozero"
    return {"data": traces, "layout": layout}


def by_work(groups: Sequence[Group], key: str, title: str) -> Figure:
    """A metric against the local steps that the clients had spent by then (mean over seeds): equal work, not rounds."""
    traces: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        rounds, mean, spread = group.band(lambda run: run.curve(key))
        # Of the runs that the metric is of, and no others: one that has not come as far would cut the steps short.
        _, steps, _ = group.band(lambda run: _steps_by_round(run) if run.curve(key) else {})
        traces += _line_with_band(index, group, rounded(steps[rounds], 0), mean, spread, "%{x:,} steps")
    return {"data": traces, "layout": _axes("local training steps, all clients together", title, legend=True)}


def _steps_by_round(run: Run) -> dict[int, float]:
    """The local steps that all clients had spent by the end of each round, from round 0 (warm-up) on."""
    return dict(enumerate(run.work("local_steps").cumsum().tolist()))


def _line_with_band(
    index: int, group: Group, x: list[float], mean: Floats, spread: Floats, hover: str
) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    if len(group.counted) > 1 and len(x):
        outline = {"x": x + x[::-1], "y": rounded(mean + spread) + rounded(mean - spread)[::-1]}
        fill = {"fill": "toself", "fillcolor": f"{colour(index)}/0.16", "line": {"width": 0}}
        traces.append({**outline, **fill, "mode": "lines", "hoverinfo": "skip", "showlegend": False,
                       "legendgroup": group.label})  # fmt: skip
    dash = DASHES[index // NUM_COLOURS % len(DASHES)]
    line = {"color": colour(index), "width": 2.5, "dash": dash}
    traces.append({"x": x, "y": rounded(mean), "mode": "lines" if len(x) > 1 else "markers", "line": line,
                   "name": group.label_and_seeds, "legendgroup": group.label, "customdata": rounded(spread),
                   "hovertemplate": f"{group.label}, {hover}: %{{y:.3f}} ± %{{customdata:.3f}}<extra></extra>",
                   })  # fmt: skip
    return traces


def _axes(x: str, y: str, legend: bool = False, **layout: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, "showlegend": legend, **layout}


def _round_axes(last_round: int, y: str, legend: bool = False, **layout: Any) -> dict[str, Any]:
    """Rounds from left to right; where there are few each has its tick, or some would stand at half rounds."""
    result = _axes("round", y, legend, **layout)
    result["xaxis"] |= {"dtick": 1} if last_round <= 12 else {}
    return result


def association(run: Run, lines: Columns, most_cells: int) -> tuple[Figure, list[int], list[Any]]:
    """The heat map of the last round, the rounds it can show, and the probabilities (cluster, column) in each."""
    cells = len(lines.members) * run.num_clusters
    shown = spread(len(run.stories), max(2, most_cells // cells))
    frames = [rounded(lines.mean(run.marginals[index]).T, 3) for index in shown]
    trace = {
        "type": "heatmap", "z": frames[-1], "x": lines.labels, "y": [f"cluster {k}" for k in range(run.num_clusters)],
        "zmin": 0, "zmax": 1, "colorscale": HEAT, "xgap": 1 if len(lines.members) < 80 else 0, "ygap": 2,
        "colorbar": _bar("probability"), "hovertemplate": "client %{x}, %{y}: %{z:.2f}<extra></extra>",
    }  # fmt: skip
    layout = _client_axis(lines) | {"yaxis": {"autorange": "reversed", "showgrid": False, "ticks": ""}}
    return {"data": [trace], "layout": layout}, (shown + 1).tolist(), frames


def _bar(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "side": "right"}, "thickness": 10, "outlinewidth": 0, "len": 0.9}


def _client_axis(lines: Columns) -> dict[str, Any]:
    """Clients along x in the order of all figures, with a strip of their colours above."""
    edges = np.flatnonzero(np.diff(lines.colour_of)) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(lines.members)]
    strip = [
        {"type": "rect", "xref": "x", "yref": "paper", "x0": a - 0.45, "x1": b - 0.55, "y0": 1.02, "y1": 1.06,
         "fillcolor": colour(int(lines.colour_of[a])), "line": {"width": 0}}
        for a, b in zip(starts, ends, strict=True)
    ]  # fmt: skip
    axis: dict[str, Any] = {
        "title": {"text": "client"},
        "type": "category",
        "showgrid": False,
        "ticks": "",
        "tickangle": 0,
    }
    if lines.thinned:
        shown = [lines.labels[i] for i in spread(len(lines.members), 8)]
        axis |= {"tickmode": "array", "tickvals": shown, "ticktext": [label.split(" ")[0] for label in shown]}
    return {"xaxis": axis, "shapes": strip, "showlegend": False, "margin": {"t": 28}}


def descent(run: Run) -> Figure:
    """The hypothesis trellis: a dot's area is its weight, lines go from parent to child, crosses are pruned."""
    tree = trellis(run)
    best_edge = tree.on_best_line[tree.edges].all(1)
    widest = np.clip(500 / (int(tree.round[-1]) + 1), 5, 16)  # neighbours in a row must not touch
    dot = np.sqrt(tree.weight) * widest + 3
    hover = [
        f"round {r}, hypothesis {h}<br>weight {w:.3f}<br>{m} clients placed differently from the best"
        + ("<br>no descendant: pruned" if p else "")
        for r, h, w, m, p in zip(tree.round, tree.rank + 1, tree.weight, tree.moved, tree.pruned, strict=True)
    ]
    traces = [_edge_trace(tree.round, tree.rank, tree.edges[~best_edge], "--muted/0.55", 1.2, "other descent"),
              _edge_trace(tree.round, tree.rank, tree.edges[best_edge], "--c0", 3, "line of the best")]  # fmt: skip
    kinds = (
        (tree.on_best_line, "--c0", "circle", "ancestor of the best"),
        (~tree.on_best_line & ~tree.pruned, "--c5", "circle", "has descendants"),
        (~tree.on_best_line & tree.pruned, "--c1", "x", "pruned"),
    )
    for chosen, paint, symbol, name in kinds:
        traces.append({
            "x": tree.round[chosen].tolist(), "y": (tree.rank[chosen] + 1).tolist(), "mode": "markers", "name": name,
            "marker": {"size": rounded(dot[chosen], 1), "color": paint, "symbol": symbol, "opacity": 1,
                       "line": {"width": 0}},
            "text": [text for text, c in zip(hover, chosen, strict=True) if c],
            "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    happened = marks(run)
    traces += _mark_traces(happened)
    layout = _round_axes(int(tree.round[-1]), "hypothesis, heaviest first", legend=True, meta="short names")
    ranks = list(range(1, int(tree.rank.max()) + 2))
    top = min([0.5, *(place - 0.2 for place in mark_places(happened))])
    layout["yaxis"] |= {"range": [ranks[-1] + 0.5, top], "showgrid": False, "zeroline": False}
    layout["yaxis"] |= {"tickvals": ranks} if len(ranks) <= 12 else {}
    layout["xaxis"] |= {"showgrid": False, "range": [0.4, int(tree.round[-1]) + 0.6]}
    return {"data": traces, "layout": layout}


def _mark_traces(happened: Sequence[Mark]) -> list[dict[str, Any]]:
    """One trace, and so one entry of the legend, for each kind of thing that happened."""
    placed = list(zip(happened, mark_places(happened), strict=True))
    traces = []
    for kind in KINDS_OF_MARK:
        own = [(mark, place) for mark, place in placed if mark.kind == kind]
        if own:
            paint, symbol = MARKS[kind]
            traces.append({
                "x": [mark.round for mark, _ in own], "y": rounded([place for _, place in own]), "mode": "markers",
                "name": MARK_NAMES[kind],
                "marker": {"size": 10, "color": paint, "symbol": symbol, "line": {"width": 1, "color": paint}},
                "text": [f"round {mark.round}<br>{mark.text}" for mark, _ in own],
                "hovertemplate": "%{text}<extra></extra>",
            })  # fmt: skip
    return traces


def _edge_trace(x: Any, y: Any, edges: Any, paint: str, width: float, name: str) -> dict[str, Any]:
    """All edges as one broken line, one colour and width."""
    ends_x = [v for a, b in edges for v in (int(x[a]), int(x[b]), None)]
    ends_y = [v for a, b in edges for v in (int(y[a]) + 1, int(y[b]) + 1, None)]
    return {"x": ends_x, "y": ends_y, "mode": "lines", "line": {"color": paint, "width": width}, "name": name,
            "hoverinfo": "skip", "showlegend": False}  # fmt: skip


def certainty(run: Run) -> Figure:
    """Above, the entropy of the association by round (mean and the least sure client); below, who moved."""
    rounds = [record["round"] for record in run.rounds]
    traces = [
        {"x": rounds, "y": rounded(run.entropy.max(1)), "mode": "lines", "name": "least sure client",
         "line": {"color": "--c1", "width": 1.5, "dash": "dot"},
         "hovertemplate": "round %{x}, least sure: %{y:.3f}<extra></extra>"},
        {"x": rounds, "y": rounded(run.entropy.mean(1)), "mode": "lines", "name": "mean over clients",
         "line": {"color": "--c0", "width": 2.5}, "hovertemplate": "round %{x}, mean: %{y:.3f}<extra></extra>"},
        {"type": "bar", "x": rounds, "y": [record["changes"] for record in run.rounds], "yaxis": "y2",
         "name": "clients that moved", "marker": {"color": "--c2"}, "showlegend": False,
         "hovertemplate": "round %{x}: %{y} moved<extra></extra>"},
    ]  # fmt: skip
    layout = _round_axes(len(rounds), "entropy, nats", legend=True)
    layout["yaxis"] |= {"domain": [0.46, 1], "rangemode": "tozero"}
    layout["yaxis2"] = {"domain": [0, 0.34], "title": {"text": "moved"}, "rangemode": "tozero"}
    layout["xaxis"] |= {"anchor": "y2"}
    return {"data": traces, "layout": layout}


def reliability(run: Run) -> Figure:
    """Stated confidence against the share that was right, a dot's area being its share of the test examples."""
    count, confidence, correct = np.asarray(run.last("calibration"), dtype=float).T
    full = count > 0
    share = count[full] / count.sum()
    traces = [
        {"x": [0, 1], "y": [0, 1], "mode": "lines", "line": {"color": "--muted", "width": 1.5, "dash": "dash"},
         "name": "perfect", "hoverinfo": "skip"},
        {"x": rounded(confidence[full] / count[full]), "y": rounded(correct[full] / count[full]),
         "mode": "lines+markers", "name": "this run", "line": {"color": "--c0", "width": 1.5},
         "marker": {"size": rounded(np.sqrt(share) * 24 + 5, 1), "color": "--c0", "line": {"width": 0}},
         "cliponaxis": False,
         "customdata": rounded(share * 100, 1),
         "hovertemplate": "said %{x:.2f}, right %{y:.2f}<br>%{customdata} % of examples<extra></extra>"},
    ]  # fmt: skip
    layout = _axes("how sure the model said it was", "share that was right")
    layout["xaxis"] |= {"range": [0, 1.04]}
    layout["yaxis"] |= {"range": [0, 1.04]}
    return {"data": traces, "layout": layout}


def client_accuracy(run: Run, lines: Columns) -> Figure:
    """Every client's accuracy on its own test data; where clients share a column, the mean and the extremes."""
    values = np.array([np.nan if v is None else v for v in run.last("client_accuracy")], dtype=float)
    tested = [members[~np.isnan(values[members])] for members in lines.members]
    known = [index for index, members in enumerate(tested) if len(members)]
    mean = np.array([values[tested[i]].mean() for i in known])
    trace: dict[str, Any] = {
        "x": [lines.labels[i] for i in known], "y": rounded(mean), "mode": "markers",
        "marker": {"size": 10 if len(known) < 80 else 6, "color": [colour(int(lines.colour_of[i])) for i in known]},
        "hovertemplate": "client %{x}: %{y:.3f}<extra></extra>",
    }  # fmt: skip
    if lines.thinned:
        above = np.array([values[tested[i]].max() for i in known]) - mean
        below = mean - np.array([values[tested[i]].min() for i in known])
        trace["error_y"] = {"type": "data", "symmetric": False, "array": rounded(above), "arrayminus": rounded(below),
                            "color": "--muted/0.5", "thickness": 1, "width": 0}  # fmt: skip
    overall = float(run.last("accuracy"))
    layout = _client_axis(lines)
    layout["yaxis"] = {"title": {"text": "accuracy"}}
    layout["shapes"] = [*layout["shapes"], {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": overall,
                        "y1": overall, "line": {"color": "--muted", "width": 1.5, "dash": "dash"}}]  # fmt: skip
    return {"data": [trace], "layout": layout}


def labels(run: Run, lines: Columns) -> Figure:
    """What share of a client's training examples each class has."""
    counts = run.train_labels
    assert counts is not None
    held = np.stack([counts[members].sum(0) for members in lines.members])  # (column, class)
    share = held / np.maximum(held.sum(1, keepdims=True), 1)
    trace = {
        "type": "heatmap", "z": rounded(share.T, 3), "x": lines.labels,
        "y": [str(label) for label in range(counts.shape[1])], "zmin": 0,
        "zmax": max(round(float(share.max()), 3), 0.01),
        "colorscale": HEAT, "xgap": 1 if len(lines.members) < 80 else 0, "ygap": 1, "colorbar": _bar("share"),
        "hovertemplate": "client %{x}, class %{y}: %{z:.3f}<extra></extra>",
    }  # fmt: skip
    axis = {"title": {"text": "class"}, "type": "category", "autorange": "reversed", "showgrid": False, "ticks": ""}
    return {"data": [trace], "layout": _client_axis(lines) | {"yaxis": axis}}


def work(run: Run) -> Figure:
    """Local steps, scored examples and numbers sent, round by round from round 0 (warm-up) on."""
    rounds = list(range(len(run.rounds) + 1))
    traffic = {"down, to clients": ("parameters_down", "--c0"), "up, to the server": ("parameters_up", "--c4")}
    traces: list[dict[str, Any]] = [
        _steps(rounds, run.work(key).tolist(), name, paint, "y", True) for name, (key, paint) in traffic.items()
    ]
    traces.append(_steps(rounds, run.work("local_steps").tolist(), "local training steps", "--c2", "y2", False))
    traces.append(_steps(rounds, run.work("scored_examples").tolist(), "scored examples", "--c3", "y3", False))
    layout = _round_axes(len(run.rounds), "numbers sent", legend=True)
    layout["yaxis"] |= {"domain": [0.70, 1], "rangemode": "tozero"}
    layout["yaxis2"] = {"domain": [0.35, 0.62], "title": {"text": "steps"}, "rangemode": "tozero"}
    layout["yaxis3"] = {"domain": [0, 0.27], "title": {"text": "scored"}, "rangemode": "tozero"}
    layout["xaxis"] |= {"anchor": "y3"}
    return {"data": traces, "layout": layout}


def _steps(x: list[int], y: list[int], name: str, paint: str, axis: str, legend: bool) -> dict[str, Any]:
    return {"x": x, "y": y, "mode": "lines", "line": {"color": paint, "width": 2, "shape": "hvh"}, "name": name,
            "yaxis": axis, "showlegend": legend, "hovertemplate": f"round %{{x}}, {name}: %{{y:,}}<extra></extra>",
            }  # fmt: skip
