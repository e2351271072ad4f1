"""What results/*.json and the paper say, as numbers: runs by method and setting, beside what the paper prints."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from bcfl.data.datasets import full_name
from bcfl.methods.attentive import FedAMP, FedSoft
from bcfl.methods.bcfl import BCFL
from bcfl.report.grouping import differences, draw_of, text_of, title_of

Record = Mapping[str, Any]  # what results/*.json holds
Draw = tuple[int, int]  # the seeds of a run and of its split
Problem = tuple[str, str]  # data set and how it is split, as headings name them

STATED_STEPS, STATED_ROUNDS = 10, 100  # the paper's, per client
STATED = {"training.local_steps": STATED_STEPS, "experiment.rounds": STATED_ROUNDS}
SELECTION_OF_FEW = 5  # what FedSoft draws for a cluster where its usual ten would be all; published for eight clients
ENOUGH_SEEDS = 3  # from fewer no order of methods is claimed
# What the published scripts draw: files in splits/ -> how the paper's tables call the setting, and what headings say.
PUBLISHED = {
    "fashion_mnist.npz": ("label(4,10,0.1)", "the published split"),
    "cifar10.npz": ("label(4,10,0.1)", "the published split"),
    "fashion_mnist-without_groups.npz": ("label(0,40,0.1)", "the published split without copies"),
}
SETTING_OF = {f"{setting}, {drawn}": setting for setting, drawn in PUBLISHED.values()}  # of what headings say
OWN_SPLITS = "our own splits (one per seed)"
# Settings that are told wherever they are another than this: our defaults, and of FedAMP what the paper's runs had.
TOLD = {
    "method.fusion": BCFL.fusion,
    "method.racing": BCFL.racing,
    "method.attention": "cosine",
    "method.variant": "attentive_mean",
}
USUAL = {**TOLD, **STATED}
MEASURES = {"accuracy": "accuracy", "macro_f1": "macro F1"}


@dataclass(frozen=True)
class Printed:
    """A number of the paper, in percent."""

    value: float
    deviation: float | None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")


Setting = tuple[str, str, int]  # data set, split and K, as the paper's tables name them
Paper = dict[Setting, dict[str, dict[str, Printed]]]  # setting -> method -> measure -> number


@dataclass(frozen=True)
class Row:
    """Runs that differ in nothing but their seed."""

    method: str
    settings: Mapping[str, Any]  # section.key -> value, of what tells it from other rows of the method
    runs: list[Record]

    @property
    def label(self) -> str:
        return ", ".join([self.method, *(f"{title_of(key)} {text_of(value)}" for key, value in self.settings.items())])

    @property
    def num_clients(self) -> int:
        return len(self.runs[0]["result"]["assignment"])

    @property
    def seeds(self) -> set[int]:
        return {run["result"]["seed"] for run in self.runs}

    def finals(self, key: str) -> list[float]:
        """In percent, where it is a share of examples."""  # (seed,)
        found = [run["result"][key] for run in self.runs if run["result"][key] is not None]
        return [100 * value for value in found] if key in MEASURES else found

    def lately(self, key: str, rounds: int = 10) -> list[float]:
        """In percent, the mean over the last rounds: a single last one may be a lucky or an unlucky one.

        Nothing where not all of them were tested.
        """  # (seed,)
        ends = [run["by_round"][key][-rounds:] for run in self.runs]
        return [] if any(None in values for values in ends) else [100 * fmean(values) for values in ends]

    def spent(self, key: str) -> list[float]:
        """What a client has spent by the end of every round, round 0 first, as a mean over clients and seeds."""
        sums = zip(*(accumulate(run["work_by_round"][key]) for run in self.runs), strict=True)
        return [fmean(values) / self.num_clients for values in sums]


def read_records(root: Path) -> list[Record]:
    """What results/ holds of every run, with the file that holds it."""
    paths = sorted((root / "results").glob("*.json"))
    return [{**json.loads(path.read_text()), "file": f"results/{path.name}"} for path in paths]


def read_paper(root: Path) -> list[dict[str, str]]:
    """The rows of the paper's tables."""
    with (root / "experiments/paper.csv").open() as file:
        return list(csv.DictReader(file))


def paper_numbers(rows: Iterable[Mapping[str, str]]) -> Paper:
    """The paper's numbers; where two of its tables hold the same row, the one with deviations, then the first."""
    found: Paper = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["table"] == "sensitivity_K"):
        both = {
            key: Printed(float(row[name]), float(row[f"{name}_sd"]) if row[f"{name}_sd"] else None)
            for key, name in (("accuracy", "accuracy"), ("macro_f1", "f1"))
        }
        found[setting_in(row)].setdefault(row["method"].lower(), both)
    return dict(found)


def setting_in(row: Mapping[str, str]) -> Setting:
    """The setting of a row of the paper's tables."""
    return row["dataset"], row["setting"], int(row["K"])


def settings_of(rows: Iterable[Mapping[str, str]], name: str) -> list[Setting]:
    """The settings of one of the paper's tables, in its order."""
    return list(dict.fromkeys(setting_in(row) for row in rows if row["table"] == name))


def problem_of(record: Record) -> Problem:
    """The data set and how it is split, in words for a heading."""
    data = record["config"]["data"]
    split = data["partition"]
    if split == "file":
        file = Path(data["partition_file"])
        published = file.parts[-3:-1] == ("experiments", "splits") and file.name in PUBLISHED
        split = ", ".join(PUBLISHED[file.name]) if published else f"the split in {file.name}"
    elif split in SETTING_OF.values():
        split = f"{split}, {OWN_SPLITS}"
    return full_name(data["name"], data["domains"]), split


def by_problem(records: Iterable[Record]) -> dict[Problem, list[Record]]:
    """The runs of each problem, in the order in which problems first come."""
    problems: dict[Problem, list[Record]] = defaultdict(list)
    for record in records:
        problems[problem_of(record)].append(record)
    return dict(problems)


def tested_problems(records: Iterable[Record]) -> dict[Problem, list[Record]]:
    """The runs of each problem that were tested on test data, without those in which clients change their group."""
    return by_problem(one for one in records if not (one["config"]["data"]["validation"] or is_drift(one)))


def rows_by_setting(problems: Mapping[Problem, list[Record]], paper: Paper) -> dict[Setting, list[Row]]:
    """What was run of the paper's settings."""
    return {
        key: rows_of(with_clusters(own, key[2]))
        for key in paper
        for problem, own in problems.items()
        if paper_key(problem, key[2]) == key
    }


def is_drift(record: Record) -> bool:
    return record["config"]["data"].get("drift_round") is not None


def clusters_of(record: Record) -> int | None:
    """K; None for a method that has none, which belongs beside every K."""
    found: int | None = record["config"]["method"].get("num_clusters")
    return found


def with_clusters(records: Iterable[Record], clusters: int | None) -> list[Record]:
    return [record for record in records if clusters_of(record) in (None, clusters)]


def paper_key(problem: Problem, clusters: int | None) -> Setting:
    """Where the paper's numbers are: it has none for splits of our own, whose heading it does not know."""
    name, split = problem
    return name, SETTING_OF.get(split, split), clusters or 0


def main_clusters(problem: Problem, records: Iterable[Record], paper: Paper) -> int | None:
    """The K of the main table: the one with which the paper runs most methods, or the one that most runs here have."""
    printed = {key[2]: len(methods) for key, methods in paper.items() if key[:2] == paper_key(problem, None)[:2]}
    here = [clusters for clusters in map(clusters_of, records) if clusters is not None]
    return max(printed, key=lambda k: printed[k]) if printed else max(here, key=here.count, default=None)


def setting_of(record: Record, key: str) -> Any:
    section, _, name = key.partition(".")
    if key == "method.variant" and record["config"]["method"]["name"] == "fedamp":
        return record["config"]["method"].get(name, FedAMP.variant)  # runs older than the option
    return record["config"][section].get(name, TOLD.get(key))


def work_of(row: Row) -> tuple[Any, ...]:
    """How much its clients are to train, by the settings that the paper states."""
    return tuple(setting_of(row.runs[0], key) for key in STATED)


def unusual(row: Row) -> dict[str, Any]:
    """The settings in which the row is not as usual."""
    return {key: own for key, usual in USUAL.items() if (own := setting_of(row.runs[0], key)) != usual}


def rank(row: Row) -> tuple[int, int, int]:
    """By which a row stands for its method, the least first: with the stated work, of most seeds, most usual.

    Racing is other work, too: it scores less. FedSoft usually draws as many clients as the published code.
    """
    other, drawn = unusual(row), row.runs[0]["config"]["method"].get("selection")
    differs = len(other) + (
        drawn not in (None, SELECTION_OF_FEW if row.num_clients <= FedSoft.selection else FedSoft.selection)
    )
    return sum(key in (*STATED, "method.racing") for key in other), -len(row.runs), differs


def rows_of(records: Iterable[Record]) -> list[Row]:
    """The runs by method and settings; settings are told where a method was run with several, or as TOLD says."""
    by_method: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_method[record["result"]["method"]].append(record)
    rows: dict[str, Row] = {}
    for method, own in by_method.items():
        for record, settings in zip(own, differences([record["config"] for record in own]), strict=True):
            told = {key: setting_of(record, key) for key, usual in TOLD.items() if setting_of(record, key) != usual}
            row = Row(method, {**told, **settings}, [])
            row = rows.setdefault(row.label, row)
            if draw_of(record["config"]) not in (draw_of(run["config"]) for run in row.runs):
                row.runs.append(record)
    return list(rows.values())
