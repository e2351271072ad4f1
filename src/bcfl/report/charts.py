"""What every figure shows, as plain data: `page.js` draws it for the browser, `paper.py` for print.

Colours are places in one palette, −1 is the muted one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from bcfl.likelihood.measures import TITLES
from bcfl.report.drawing import MARK_NAMES, Columns, columns, mark_places, marks, spread, trellis
from bcfl.report.reading import Floats, Group, Ints, Run
from bcfl.report.tables import leading

NUM_COLOURS = 8
# Kind of mark -> its colour and sign: one colour for what clusters do, others for clients.
SIGNS = {
    "birth": (6, "▲"),
    "merge": (6, "◆"),
    "death": (6, "▼"),
    "newcomer": (2, "✚"),
    "drift": (4, "★"),
    "followed": (4, "☆"),
}


@dataclass(frozen=True)
class Series:
    """One name of the legend: points in order, joined or not."""

    name: str
    x: list[float]
    y: list[Any]
    kind: Literal["line", "steps", "bars", "dots", "links"] = "line"  # links: x and y are pairs of ends
    colour: int | list[int] = 0  # one for all points, or one each
    dash: int = 0  # 0 is solid
    width: float = 2.5
    low: list[float] | None = None  # of a band around a line, or whiskers of dots
    high: list[float] | None = None
    size: list[float] | None = None  # diameters of dots
    sign: str = "●"
    texts: list[str] | None = None  # what is told of each point, instead of its numbers
    told: bool = True  # in legend, table, and to whoever points at it


@dataclass(frozen=True)
class Panel:
    """Series on one pair of axes."""

    x: str
    y: str
    series: list[Series]
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None  # downwards where the first is the larger
    from_zero: bool = False
    whole: bool = True  # ticks of x are whole numbers
    counts: bool = False  # and those of y
    names: list[str] | None = None  # of x = 0, 1, 2 …
    strip: list[int] | None = None  # a colour above each name
    level: float | None = None  # a dashed line across


@dataclass(frozen=True)
class Heat:
    """Shares in cells, at one round or several."""

    label: str  # what the shares are of
    y: str
    rows: list[str]
    names: list[str]  # of the columns
    strip: list[int]
    frames: list[list[list[float]]]  # (round, row, column)
    rounds: list[int]
    most: float = 1.0


Chart = list[Panel | Heat]  # above one another


def rounded(values: Any, digits: int = 4) -> Any:
    """Plain numbers with only the digits that can be seen: the page stays small."""
    return np.round(np.asarray(values, dtype=float), digits).tolist()


def slug(label: str) -> str:
    return re.sub(r"[^\w.]+", "-", label)


def by_round(groups: Sequence[Group], key: str, title: str) -> Chart:
    """A metric by round: one line a group, with a band of one standard deviation where there are several seeds."""
    lines = []
    for index, group in enumerate(groups):
        rounds, mean, deviation = group.band(lambda run: run.curve(key))
        lines.append(_line(index, group, rounds.tolist(), mean, deviation))
    return [Panel("round", title, lines)]


def by_work(groups: Sequence[Group], key: str, title: str) -> Chart:
    """A metric against the local steps that the clients had spent by then (mean over seeds): equal work, not rounds."""
    lines = []
    for index, group in enumerate(groups):
        rounds, mean, deviation = group.band(lambda run: run.curve(key))
        # Of the runs that the metric is of, and no others: one that has not come as far would cut the steps short.
        _, steps, _ = group.band(lambda run: _steps_by_round(run) if run.curve(key) else {})
        lines.append(_line(index, group, rounded(steps[rounds], 0), mean, deviation))
    return [Panel("local training steps, all clients together", title, lines)]


def _steps_by_round(run: Run) -> dict[int, float]:
    """The local steps that all clients had spent by the end of each round, from round 0 (warm-up) on."""
    return dict(enumerate(run.work("local_steps").cumsum().tolist()))


def _line(index: int, group: Group, x: list[float], mean: Floats, deviation: Floats) -> Series:
    line = Series(group.label_and_seeds, x, rounded(mean), colour=index % NUM_COLOURS, dash=index // NUM_COLOURS)
    if len(group.counted) == 1:
        return line
    return replace(line, low=rounded(mean - deviation), high=rounded(mean + deviation))


def association(run: Run, shown: Ints, most_columns: int = 160) -> Chart | None:
    """The probability of each cluster for each client, at the rounds with these indices."""
    if not run.clusters_clients:
        return None
    lines = columns(run, most_columns)
    frames = [rounded(lines.mean(run.marginals[index]).T, 3) for index in shown]
    rows = [f"cluster {cluster}" for cluster in range(run.num_clusters)]
    return [Heat("probability", "", rows, lines.labels, lines.colour_of.tolist(), frames, (shown + 1).tolist())]


def descent(run: Run) -> Chart | None:
    """The hypothesis trellis: a dot's area is its weight, lines go from parent to child, crosses are pruned."""
    happened = marks(run) if run.clusters_clients else []
    if not (run.clusters_clients and (run.carries_hypotheses or happened)):
        return None
    tree, places = trellis(run), mark_places(happened)
    widest = np.clip(500 / (int(tree.round[-1]) + 1), 5, 16)  # neighbours in a row must not touch
    diameter = np.sqrt(tree.weight) * widest + 3
    texts = np.array([
        f"round {r}, hypothesis {h}: weight {w:.3f}, {m} clients placed differently from the best"
        + (", no descendant: pruned" if pruned else "")
        for r, h, w, m, pruned in zip(tree.round, tree.rank + 1, tree.weight, tree.moved, tree.pruned, strict=True)
    ])  # fmt: skip

    def links(chosen: Any, colour: int, width: float) -> Series:
        ends = tree.edges[chosen]
        x, y = tree.round[ends].tolist(), (tree.rank[ends] + 1).tolist()
        return Series("", x, y, "links", colour, width=width, told=False)

    def dots(chosen: Any, name: str, colour: int, sign: str = "●") -> Series:
        x, y, told = tree.round[chosen].tolist(), (tree.rank[chosen] + 1).tolist(), texts[chosen].tolist()
        return Series(name, x, y, "dots", colour, size=rounded(diameter[chosen], 1), sign=sign, texts=told)

    best, other = tree.on_best_line[tree.edges].all(1), ~tree.on_best_line
    series = [
        links(~best, -1, 1.2),
        links(best, 0, 3),
        dots(tree.on_best_line, "ancestor of the best", 0),
        dots(other & ~tree.pruned, "has descendants", 5),
        dots(other & tree.pruned, "pruned", 1, "✕"),
    ]
    for kind, (colour, sign) in SIGNS.items():
        x, y, told = [], [], []
        for mark, place in zip(happened, places, strict=True):
            if mark.kind == kind:
                x.append(float(mark.round))
                y.append(round(place, 4))
                told.append(f"round {mark.round}: {mark.text}")
        series.append(Series(MARK_NAMES[kind], x, y, "dots", colour, size=[10.0] * len(x), sign=sign, texts=told))
    low = int(tree.rank.max()) + 1.6
    high = min([0.4, *(place - 0.2 for place in places)])
    shown = [one for one in series if one.x]
    across = (0.4, int(tree.round[-1]) + 0.6)
    return [Panel("round", "hypothesis, heaviest first", shown, across, (low, high), counts=True)]


def certainty(run: Run) -> Chart | None:
    """Above, the entropy of the association by round (mean and the least sure client); below, who moved."""
    if not run.clusters_clients:
        return None
    rounds = [record["round"] for record in run.rounds]
    entropy = [
        Series("least sure client", rounds, rounded(run.entropy.max(1)), colour=1, dash=2, width=1.5),
        Series("mean over clients", rounds, rounded(run.entropy.mean(1))),
    ]
    moved = Series("clients that moved", rounds, [record["changes"] for record in run.rounds], "bars", 2)
    return [
        Panel("round", "entropy, nats", entropy, from_zero=True),
        Panel("round", "moved", [moved], from_zero=True, counts=True),
    ]


def calibration(run: Run) -> Chart | None:
    """Stated confidence against the share that was right, a dot's area being its share of the test examples."""
    if run.last("calibration") is None:
        return None
    count, confidence, correct = np.asarray(run.last("calibration"), dtype=float).T
    full = count > 0
    said, right, share = confidence[full] / count[full], correct[full] / count[full], count[full] / count.sum()
    told = [f"said {s:.2f}, right {r:.2f}: {p:.1%} of examples" for s, r, p in zip(said, right, share, strict=True)]
    x, y, size = rounded(said), rounded(right), rounded(np.sqrt(share) * 24 + 5, 1)
    series = [
        Series("", [0, 1], [0, 1], colour=-1, dash=1, width=1.5, told=False),
        Series("", x, y, width=1.5, told=False),
        Series("", x, y, "dots", size=size, texts=told),
    ]
    return [Panel("how sure the model said it was", "share that was right", series, (0, 1), (0, 1), whole=False)]


def client_measure(run: Run, most_columns: int = 160) -> Chart | None:
    """Every client's leading measure on its own test data; where clients share a column, the mean and the extremes."""
    measure = leading(run)
    if run.last(f"client_{measure}") is None or run.last(measure) is None:
        return None
    lines = columns(run, most_columns)
    values = np.array([np.nan if v is None else v for v in run.last(f"client_{measure}")], dtype=float)
    tested = [members[~np.isnan(values[members])] for members in lines.members]
    known = [index for index, members in enumerate(tested) if len(members)]
    mean, low, high = (rounded([of(values[tested[i]]) for i in known]) for of in (np.mean, np.min, np.max))
    dots = Series(
        "", [float(i) for i in known], mean, "dots", [int(lines.colour_of[i]) for i in known],
        low=low if lines.thinned else None, high=high if lines.thinned else None,
        size=[10.0 if len(known) < 80 else 6.0] * len(known),
        texts=[f"client {lines.labels[i]}: {value:.3f}" for i, value in zip(known, mean, strict=True)],
    )  # fmt: skip
    return [_of_clients(lines, TITLES[measure], dots, run.last(measure))]


def _of_clients(lines: Columns, y: str, dots: Series, level: float) -> Panel:
    ends = (-0.5, len(lines.members) - 0.5)
    return Panel("client", y, [dots], ends, names=lines.labels, strip=lines.colour_of.tolist(), level=level)


def labels(run: Run, most_columns: int = 160) -> Chart | None:
    """What share of a client's training examples each class has."""
    if run.train_labels is None:
        return None
    lines = columns(run, most_columns)
    held = np.stack([run.train_labels[members].sum(0) for members in lines.members])  # (column, class)
    share = held / np.maximum(held.sum(1, keepdims=True), 1)
    classes = [str(label) for label in range(held.shape[1])]
    most = max(round(float(share.max()), 3), 0.01)
    cells = rounded(share.T, 3)
    return [Heat("share", "class", classes, lines.labels, lines.colour_of.tolist(), [cells], [len(run.rounds)], most)]


def work(run: Run) -> Chart:
    """Local steps, scored examples and numbers sent, round by round from round 0 (warm-up) on."""
    rounds = [float(index) for index in range(len(run.rounds) + 1)]

    def steps(name: str, key: str, colour: int) -> Series:
        return Series(name, rounds, run.work(key).tolist(), "steps", colour, width=2)

    traffic = [steps("down, to clients", "parameters_down", 0), steps("up, to the server", "parameters_up", 4)]
    return [
        Panel("round", "numbers sent", traffic, from_zero=True),
        Panel("round", "steps", [steps("local training steps", "local_steps", 2)], from_zero=True),
        Panel("round", "scored", [steps("scored examples", "scored_examples", 3)], from_zero=True),
    ]


def shown_rounds(run: Run, most_cells: int) -> Ints:
    """The rounds, as indices, that a heat map of at most so many numbers can show."""
    cells = len(columns(run).members) * run.num_clusters
    return spread(len(run.associations), max(2, most_cells // cells))


def of_run(run: Run, shown: Ints) -> dict[str, Chart]:
    """All charts that this run has something for; who is where at the rounds with these indices."""
    found = {
        "association": association(run, shown),
        "trellis": descent(run),
        "certainty": certainty(run),
        "calibration": calibration(run),
        "client_measure": client_measure(run),
        "labels": labels(run),
        "work": work(run),
    }
    return {name: chart for name, chart in found.items() if chart is not None}
