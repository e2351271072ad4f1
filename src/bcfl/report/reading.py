"""A run folder as arrays, finished or not: what every figure and table is made from."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bcfl.association.hypotheses import align, entropy, marginals, renumbering
from bcfl.association.membership import mixed, read
from bcfl.data.manifest import groups_in
from bcfl.methods import make_method
from bcfl.predict.metrics import follow_drift
from bcfl.report.grouping import differences, draw_of, rows_in_order, text_of, title_of
from bcfl.runs.records import (
    EVENTS,
    LOOSE,
    SECTIONS,
    SETTINGS,
    check,
    read_associations,
    read_manifest,
    read_object,
    read_rounds,
    read_timings,
)
from bcfl.runs.settings import parse_config
from bcfl.runs.store import RunFolder

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Association:
    """The hypotheses of one round, heaviest first."""

    parent: Ints  # (hypothesis,) -> hypothesis of the round before
    weight: Floats  # (hypothesis,)
    assignment: Ints  # (hypothesis, client) -> cluster; −1: never associated yet
    events: tuple[dict[str, Any], ...] = ()  # births, merges and deaths of clusters, where the method tells of them
    membership: torch.Tensor | None = None  # as in RoundInfo.probability, where the method tells of it


@dataclass(frozen=True)
class Run:
    """What a run folder says, up to the last round that all of its logs hold."""

    path: Path
    config: dict[str, dict[str, Any]]
    manifest: dict[str, Any]
    environment: dict[str, Any]  # the last one's versions and machine, and under "before" those of earlier ones
    start_work: dict[str, int]  # before the first round: warm-up
    rounds: list[dict[str, Any]]  # round 1 first
    associations: list[Association]  # (round,)
    seconds: list[float]  # (round,)
    complete: bool

    @property
    def method(self) -> str:
        return str(self.config["method"]["name"])

    @property
    def seed(self) -> int:
        return int(self.config["experiment"]["seed"])

    @property
    def num_clients(self) -> int:
        return int(self.manifest["num_clients"])

    def name_of(self, client: int) -> str:
        """What a client is called: by its name, or by its number where it has none."""
        names = self.manifest.get("names")
        return str(client) if names is None else str(names[client])

    @cached_property
    def group(self) -> Ints | None:
        """The true groups, where they are known."""  # (client,)
        group = self.manifest.get("group")
        return None if group is None else np.asarray(group, dtype=np.int64)

    @cached_property
    def groups(self) -> Ints | None:
        """The true groups in every round, where they are known."""  # (round, client)
        known = [groups_in(self.manifest, record["round"]) for record in self.rounds]
        told = [group.numpy() for group in known if group is not None]
        return np.stack(told) if told and len(told) == len(known) else None

    @cached_property
    def drift(self) -> dict[str, Any] | None:
        """How changes of the true groups were followed so far; None without any, or with nothing to associate."""
        if self.manifest.get("drift") is None or self.groups is None or not self.associations:
            return None
        return follow_drift(self.placed, torch.from_numpy(self.groups))

    @property
    def placed(self) -> torch.Tensor:
        """Where the best hypothesis of every round has the clients."""  # (round, client)
        return torch.from_numpy(np.stack([one.assignment[0] for one in self.associations]))

    @property
    def train_labels(self) -> Ints | None:
        """How many training examples of each class a client holds; a real federation's server is not told."""
        labels = self.manifest.get("train_labels")
        return None if labels is None else np.asarray(labels, dtype=np.int64)  # (client, class)

    @cached_property
    def num_clusters(self) -> int:
        return max([self._asked_clusters, *(int(one.assignment.max()) + 1 for one in self.associations)])

    @property
    def _asked_clusters(self) -> int:
        """The clusters that are there from the start; a method that finds their number begins with one."""
        return int(self.config["method"].get("num_clusters") or 1)

    @property
    def clusters_clients(self) -> bool:
        """Whether there is something to associate: not one model for all, nor one for each."""
        return bool(self.associations) and 1 < self.num_clusters < max(self.num_clients, 3)

    @property
    def carries_hypotheses(self) -> bool:
        """Whether several hypotheses lived on from round to round (a consensus merges them, so none has children)."""
        return any(record["num_hypotheses"] > 1 for record in self.rounds)

    @cached_property
    def marginals(self) -> Floats:
        """How likely each client belongs to each cluster, in every round.

        Clusters are numbered as in the best hypothesis of the last round, so that a number means the same throughout.
        """  # (round, client, cluster)
        last = torch.from_numpy(self.associations[-1].assignment[:1])
        result = np.empty((len(self.associations), self.num_clients, self.num_clusters))
        for index, one in enumerate(self.associations):
            own, log_weight = torch.from_numpy(one.assignment), torch.from_numpy(one.weight).log()
            if one.membership is None:
                named = align(torch.cat([last, own]), self.num_clusters)[1:]
                result[index] = marginals(named, log_weight, self.num_clusters).numpy()
                continue
            told = mixed(one.membership, own, log_weight)
            names = renumbering(torch.cat([last, own[:1]]), self.num_clusters)[1]
            result[index] = 0
            result[index][:, names[: told.shape[1]].numpy()] = told.numpy()
        return result

    @cached_property
    def entropy(self) -> Floats:
        """How unsure each client's association is in every round, in nats.

        One that was never placed may be in any cluster that the best hypothesis has, as in `Result.entropy`.
        """  # (round, client)
        found = [len(np.unique(row[row >= 0])) for row in self.placed.numpy()]
        anywhere = np.log(np.maximum(found, self._asked_clusters))[:, None]
        return np.where(self.placed.numpy() < 0, anywhere, entropy(torch.from_numpy(self.marginals)).numpy())

    @cached_property
    def order(self) -> Ints:
        """The clients as figures line them up: by true group, or by final cluster where groups are unknown."""
        order: Ints = np.argsort(self.colour_of, kind="stable")
        return order  # (position,) -> client

    @property
    def colour_of(self) -> Ints:
        """The true group of each client, or its final cluster where groups are unknown."""  # (client,)
        if self.group is not None:
            return self.group
        if self.clusters_clients:
            final: Ints = self.associations[-1].assignment[0]
            return final
        return np.zeros(self.num_clients, dtype=np.int64)

    def last(self, key: str) -> Any:
        """The last recorded value of a metric; None if there is none."""
        return next((record[key] for record in reversed(self.rounds) if record.get(key) is not None), None)

    def curve(self, key: str) -> dict[int, float]:
        """A metric by round, at the rounds where it was measured."""
        return {r["round"]: r[key] for r in self.rounds if r.get(key) is not None}

    def work(self, key: str) -> Ints:
        """What was spent in every round, round 0 (warm-up) first."""  # (round + 1,)
        return np.array(
            [self.start_work.get(key, 0), *(record["work"].get(key, 0) for record in self.rounds)], dtype=np.int64
        )


def read_run(path: Path) -> Run:
    """The run in a folder; a line that a running or killed process has only half written does not count.

    Whatever is not as a run writes it is named in one line: the file, the line, and what may stand there.
    """
    if not (path / "config.json").is_file() or not (path / "manifest.json").is_file():
        raise ValueError(f"{path} is not a run folder (it has no config.json and manifest.json)")
    config = _read_settings(path / "config.json")
    manifest = read_manifest(path)
    clients, asked = manifest["num_clients"], config["method"].get("num_clusters") or 1
    records, timings = read_rounds(path, clients), read_timings(path)
    associations = [_association(line) for line in read_associations(path, clients, asked)]
    count = min(max(len(records) - 1, 0), len(associations), len(timings))
    complete = (path / "result.json").is_file()
    if complete and count < config["experiment"]["rounds"]:
        read_object(path / "result.json")
        raise ValueError(f"{path} is damaged: its run is complete after {config['experiment']['rounds']} rounds, but "
                         f"its logs hold {count}")  # fmt: skip
    RunFolder(path).refuse_changed_logs()
    environment = path / "environment.json"
    return Run(
        path=path,
        config=config,
        manifest=manifest,
        environment=read_object(environment) if environment.is_file() else {},
        start_work=records[0]["work"] if records else {},
        rounds=[_measured(record) for record in records[1 : count + 1]],
        associations=associations[:count],
        seconds=[line["seconds"] for line in timings[:count]],
        complete=complete,
    )


def read_runs(paths: Iterable[Path], tell: Callable[[str], None] | None = None) -> list[Run]:
    """The runs in these folders; a folder of run folders stands for all runs directly in it.

    With `tell` a run that cannot be read is told there and the others are read, as long as there are any.
    """
    found: dict[Path, Run] = {}
    troubles: list[ValueError] = []
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"run folder {path} does not exist")
        inside = sorted(file.parent for file in path.glob("*/manifest.json"))  # of runs that have begun
        for folder in [path] if (path / "config.json").exists() or not inside else inside:
            try:
                found.setdefault(folder.resolve(), read_run(folder))
            except ValueError as error:
                if tell is None:
                    raise
                troubles.append(error)
    if troubles and not found:
        raise troubles[0]
    if tell is not None:
        for trouble in troubles:
            tell(f"left out: {trouble}")
    return list(found.values())


def _read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """The settings as the run has written them; a foreign file is named here rather than met later."""
    config = read_object(path, lambda _: SECTIONS)
    for section, kinds in SETTINGS.items():
        check(config[section], kinds, f"{path}, {section}")
    try:
        parse_config(understood(config))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def is_installed(method: str) -> bool:
    """Whether there is a method of that name here; a run of another is shown with its numbers all the same."""
    try:
        make_method(method, {})
    except ValueError:
        return False
    return True


def understood(config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings without those of a method that is not installed here: only its author knows what they may be."""
    left_out = set() if is_installed(config["method"]["name"]) else {"method"}
    return {section: values for section, values in config.items() if section not in left_out}


def _association(line: dict[str, Any]) -> Association:
    events = tuple(event for event in line.get("events") or () if event.get("kind") in EVENTS)
    parent, told = np.array(line["parent"]), line.get("probability")
    membership = None if told is None else read(told, torch.from_numpy(parent))
    return Association(parent, np.exp(line["log_weight"]), np.array(line["assignment"]), events, membership)


def _measured(record: dict[str, Any]) -> dict[str, Any]:
    """A line of rounds.jsonl in which what is not finite counts as not measured."""
    lost = [key for key in LOOSE if key in record and not math.isfinite(record[key] or 0)]
    if not np.isfinite(np.array(record.get("calibration") or 0, dtype=float)).all():
        lost.append("calibration")
    return {**record, **dict.fromkeys(lost)}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    method: str
    settings: dict[str, Any]  # section.key -> value, of what differs between groups beside the method
    runs: list[Run]

    @property
    def label(self) -> str:
        """The method and what else tells the group from others."""
        return ", ".join([self.method, *(f"{title_of(key)} {text_of(v)}" for key, v in self.settings.items())])

    @property
    def label_and_seeds(self) -> str:
        """The label for a curve, which is a mean over that many."""
        unfinished = ", unfinished" * (not self.has_complete)
        return f"{self.label} ({len(self.counted)} seed{'s' * (len(self.counted) != 1)}{unfinished})"

    @property
    def has_complete(self) -> bool:
        return any(run.complete for run in self.runs)

    @property
    def counted(self) -> list[Run]:
        """The runs that every mean is over: the complete ones; where there is none, all that have something to tell."""
        begun = [run for run in self.runs if run.rounds]
        return [run for run in begun if run.complete] or begun

    @property
    def unfinished(self) -> list[Run]:
        return [run for run in self.runs if not run.complete]

    @property
    def representative(self) -> Run:
        """The run whose associations stand for the group: the first that has got furthest."""
        return max(self.runs, key=lambda run: len(run.rounds))

    def band(self, value_of: Callable[[Run], dict[int, float]]) -> tuple[Ints, Floats, Floats]:
        """Mean and sample standard deviation over seeds, at the rounds that all of the runs that count have reached."""
        curves = [curve for curve in map(value_of, self.counted) if curve]
        rounds = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
        values = np.array([[curve[r] for r in rounds] for curve in curves]).reshape(len(curves), len(rounds))
        spread = values.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(rounds))
        mean = values.mean(0) if curves else np.zeros(0)
        return np.array(rounds, dtype=np.int64), mean, spread  # three times (round,)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """The runs by method and settings, as a table has them."""
    groups: dict[str, Group] = {}
    for run, settings in zip(runs, differences([run.config for run in runs]), strict=True):
        group = groups.setdefault(json.dumps([run.method, settings]), Group(run.method, settings, []))
        if draw_of(run.config) not in (draw_of(other.config) for other in group.runs):
            group.runs.append(run)
    found = list(groups.values())
    return [found[row] for row in rows_in_order([(group.method, group.settings) for group in found])]


def unfinished_runs(groups: Sequence[Group]) -> list[str]:
    """What must be said beside means of these groups about runs that are not complete, if there are any."""
    said = []
    for has_complete, what in ((True, "not counted"), (False, "counted as far as they have got")):
        told = [
            f"{group.label} {len(group.unfinished)} of {len(group.runs)}"
            for group in groups
            if group.unfinished and group.has_complete == has_complete
        ]
        said += [f"Unfinished runs, {what}: {'; '.join(told)}"] if told else []
    return said
