"""From rows to clients: dummy columns and scales come from training rows alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bcfl.benchmark.sources import Array, Rows, read
from bcfl.benchmark.splits import Split, split, verify
from bcfl.benchmark.tasks import Task


@dataclass(frozen=True)
class Federation:
    """A task ready to be learned: every site's training and test rows as numbers."""

    task: Task
    draw: int
    sites: tuple[str, ...]
    x: tuple[Array, ...]  # site -> (row, input) float32
    y: tuple[Array, ...]  # site -> (row, …)
    x_test: tuple[Array, ...]
    y_test: tuple[Array, ...]
    group: tuple[int, ...] | None  # the kind of each site, where known
    newcomers: tuple[int, ...]  # the sites that are kept out where newcomers are tried

    @property
    def num_inputs(self) -> int:
        return int(self.x[0].shape[1])

    @property
    def num_classes(self) -> int:
        return int(max(y.max() for y in (*self.y, *self.y_test))) + 1

    def only(self, places: tuple[int, ...]) -> "Federation":
        """The same task with these sites alone."""
        of = {name: tuple(getattr(self, name)[i] for i in places) for name in ("sites", "x", "y", "x_test", "y_test")}
        group = None if self.group is None else tuple(self.group[i] for i in places)
        return Federation(task=self.task, draw=self.draw, group=group, newcomers=(), **of)


def federation(task: Task, draw: int = 0) -> Federation:
    """A task with one of its frozen splits, if its data are what was frozen."""
    rows = read(task)
    verify(task, rows)
    return prepared(task, rows, split(task, rows, draw), draw)


def prepared(task: Task, rows: Rows, drawn: Split, draw: int) -> Federation:
    """Inputs and real targets have mean 0 and deviation 1 over all training rows; times have a mean of 1."""
    training = np.concatenate(list(drawn.train.values()))
    x = np.column_stack(
        [_standard(column, training) for name in rows.inputs for column in _coded(rows, name, training)]
    )
    y = _target(task, rows.target, training)
    parts = {
        "x": (x.astype(np.float32), drawn.train), "y": (y, drawn.train),
        "x_test": (x.astype(np.float32), drawn.test), "y_test": (y, drawn.test),
    }  # fmt: skip
    of: dict[str, Any] = {name: tuple(table[at] for at in held.values()) for name, (table, held) in parts.items()}
    sites = tuple(drawn.train)
    group = None if rows.group is None else tuple(rows.group[site] for site in sites)
    return Federation(
        task=task, draw=draw, sites=sites, group=group, newcomers=tuple(map(sites.index, drawn.newcomers)), **of
    )


def _coded(rows: Rows, name: str, training: Array) -> list[Array]:
    """A number as it is, a category as a column for each but the first of those that training rows have."""
    column = rows.inputs[name]
    if column.dtype.kind != "U":
        return [column]
    return [(column == level).astype(np.float64) for level in np.unique(column[training])[1:]]


def _standard(column: Array, training: Array) -> Array:
    """Mean 0 and deviation 1 over the training rows; what is missing is the mean."""
    known = column[training]
    known = known[~np.isnan(known)]
    deviation = known.std()
    centred: Array = np.nan_to_num(column - known.mean())
    return centred / (deviation if deviation > 1e-9 * max(1.0, abs(known).max()) else 1.0)


def _target(task: Task, target: Array, training: Array) -> Array:
    if task.kind == "real":
        return _standard(target[:, 0], training).astype(np.float32)
    if task.kind == "time":
        scaled = target.astype(np.float64)
        scaled[:, 0] /= scaled[training, 0].mean()
        return scaled.astype(np.float32)
    return target[:, 0].astype(np.int64)
