"""A run folder as arrays, finished or not: what every figure and table is made from."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bcfl.association import align, entropy, marginals
from bcfl.data.manifest import groups_in
from bcfl.experiment.config import parse_config
from bcfl.experiment.metrics import follow_drift, rounds_until_associated
from bcfl.experiment.sweep import differences, text_of, title_of
from bcfl.methods import make_method

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stories:
    """The hypotheses of one round, heaviest first."""

    parent: Ints  # (hypothesis,) -> hypothesis of the round before
    weight: Floats  # (hypothesis,)
    assignment: Ints  # (hypothesis, client) -> cluster; −1: never associated yet
    events: tuple[dict[str, Any], ...] = ()  # births, merges and deaths of clusters, where the method tells of them


@dataclass(frozen=True)
class Run:
    """What a run folder says, up to the last round that all of its logs hold."""

    path: Path
    config: dict[str, dict[str, Any]]
    manifest: dict[str, Any]
    environment: dict[str, str]
    start_work: dict[str, int]  # before the first round: warm-up
    rounds: list[dict[str, Any]]  # round 1 first
    stories: list[Stories]  # (round,)
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
        if self.manifest.get("drift") is None or self.groups is None or not self.clusters_clients:
            return None
        return follow_drift(self.placed, torch.from_numpy(self.groups))

    @property
    def placed(self) -> torch.Tensor:
        """Where the best hypothesis of every round has the clients."""  # (round, client)
        return torch.from_numpy(np.stack([one.assignment[0] for one in self.stories]))

    @property
    def train_labels(self) -> Ints | None:
        """How many training examples of each class a client holds; a real federation's server is not told."""
        labels = self.manifest.get("train_labels")
        return None if labels is None else np.asarray(labels, dtype=np.int64)  # (client, class)

    @cached_property
    def num_clusters(self) -> int:
        options = {key: value for key, value in self.config["method"].items() if key != "name"}
        asked = int(getattr(make_method(self.method, options), "num_clusters", 1))
        return max([asked, *(int(one.assignment.max()) + 1 for one in self.stories)])

    @property
    def clusters_clients(self) -> bool:
        """Whether there is something to associate: not one model for all, nor one for each."""
        return bool(self.stories) and 1 < self.num_clusters < max(self.num_clients, 3)

    @property
    def carries_hypotheses(self) -> bool:
        """Whether several hypotheses lived on from round to round (a consensus merges them, so none has children)."""
        return any(record["num_hypotheses"] > 1 for record in self.rounds)

    @cached_property
    def marginals(self) -> Floats:
        """How likely each client belongs to each cluster, in every round.

        Clusters are numbered as in the best hypothesis of the last round, so that a number means the same throughout.
        """  # (round, client, cluster)
        last = torch.from_numpy(self.stories[-1].assignment[:1])
        result = np.empty((len(self.stories), self.num_clients, self.num_clusters))
        for index, one in enumerate(self.stories):
            named = align(torch.cat([last, torch.from_numpy(one.assignment)]), self.num_clusters)[1:]
            result[index] = marginals(named, torch.from_numpy(one.weight).log(), self.num_clusters).numpy()
        return result

    @cached_property
    def entropy(self) -> Floats:
        """How unsure each client's association is in every round, in nats."""  # (round, client)
        return entropy(torch.from_numpy(self.marginals)).numpy()

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
            final: Ints = self.stories[-1].assignment[0]
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
    """The run in a folder; a line that a running or killed process has only half written does not count."""
    if not (path / "config.json").is_file() or not (path / "manifest.json").is_file():
        raise ValueError(f"{path} is not a run folder (it has no config.json and manifest.json)")
    config = _read_json(path / "config.json")
    parse_config(config)  # a foreign config.json is named here rather than met later
    environment = _read_json(path / "environment.json") if (path / "environment.json").is_file() else {}
    records, timings = _lines(path / "rounds.jsonl"), _lines(path / "timings.jsonl")
    stories = [
        Stories(
            np.asarray(line["parent"]),
            np.exp(line["log_weight"]),
            np.asarray(line["assignment"]),
            tuple(line.get("events", ())),
        )
        for line in _lines(path / "associations.jsonl")
    ]
    start_work = records[0]["work"] if records else {}
    count = min(len(records[1:]), len(stories), len(timings))
    return Run(
        path=path,
        config=config,
        manifest=_read_json(path / "manifest.json"),
        environment=environment,
        start_work=start_work,
        rounds=records[1 : count + 1],
        stories=stories[:count],
        seconds=[line["seconds"] for line in timings[:count]],
        complete=(path / "result.json").is_file(),
    )


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """The runs in these folders; a folder of run folders stands for all runs directly in it."""
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"run folder {path} does not exist")
        inside = sorted(file.parent for file in path.glob("*/manifest.json"))  # of runs that have begun
        for folder in [path] if (path / "config.json").exists() or not inside else inside:
            found.setdefault(folder.resolve(), read_run(folder))
    return list(found.values())


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end is half a line
    try:
        return [json.loads(line) for line in whole]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


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

    def band(self, value_of: Callable[[Run], dict[int, float]]) -> tuple[Ints, Floats, Floats]:
        """Mean and sample standard deviation over seeds, at the rounds that all of the group's runs have reached."""
        curves = [curve for curve in map(value_of, self.runs) if curve]
        rounds = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
        values = np.array([[curve[r] for r in rounds] for curve in curves]).reshape(len(curves), len(rounds))
        spread = values.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(rounds))
        mean = values.mean(0) if curves else np.zeros(0)
        return np.array(rounds, dtype=np.int64), mean, spread  # three times (round,)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """The runs by method and settings, in the order in which they first appear."""
    groups: dict[str, Group] = {}
    for run, settings in zip(runs, differences([run.config for run in runs]), strict=True):
        groups.setdefault(json.dumps([run.method, settings]), Group(run.method, settings, [])).runs.append(run)
    return list(groups.values())


def accumulated_co_association(run: Run, clients: Ints | None = None) -> Floats:
    """The probability that two clients share a cluster, added up over all rounds and divided by their number."""
    chosen = np.arange(run.num_clients) if clients is None else clients
    shared = np.zeros((len(chosen), len(chosen)))
    for one in run.stories:
        # One 0/1 column per (hypothesis, cluster), so that a round's co-association is a single matrix product.
        member = one.assignment[:, chosen, None] == np.arange(run.num_clusters)  # (hypothesis, client, cluster)
        columns = member.transpose(1, 0, 2).reshape(len(chosen), -1).astype(float)
        shared += (columns * np.repeat(one.weight, run.num_clusters)) @ columns.T
    return shared / max(len(run.stories), 1)  # (client, client)


@dataclass(frozen=True)
class Columns:
    """The clients side by side in a figure: one column each, or several neighbours together where there are many."""

    members: list[Ints]  # (column,) -> clients
    colour_of: Ints  # (column,)

    @property
    def labels(self) -> list[str]:
        return [str(m[0]) if len(m) == 1 else f"{m[0]} … {m[-1]}" for m in self.members]

    @property
    def thinned(self) -> bool:
        return any(len(m) > 1 for m in self.members)

    def mean(self, values: Floats) -> Floats:
        """The mean of each column's clients, over the first axis."""  # (client, …) -> (column, …)
        return np.stack([values[m].mean(0) for m in self.members])


def columns(run: Run, most: int = 160) -> Columns:
    """At most about `most` columns; only clients of one colour are put together."""
    size = -(-run.num_clients // most)
    members = []
    for colour in np.unique(run.colour_of):
        own = run.order[run.colour_of[run.order] == colour]
        members += [own[i : i + size] for i in range(0, len(own), size)]
    return Columns(members, np.array([run.colour_of[m[0]] for m in members]))


def spread(count: int, most: int) -> Ints:
    """At most `most` of 0 … count − 1, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


@dataclass(frozen=True)
class Trellis:
    """Which hypothesis descends from which; nodes are numbered round by round, heaviest first."""

    round: Ints  # (node,)
    rank: Ints  # (node,)
    weight: Floats  # (node,)
    moved: Ints  # (node,) clients that this hypothesis places differently from the round's best one
    edges: Ints  # (edge, 2) -> parent node, child node
    on_best_line: NDArray[np.bool_]  # (node,) the ancestors of the final best hypothesis, and itself
    pruned: NDArray[np.bool_]  # (node,) without a child in the next round shown


def trellis(run: Run, most_rounds: int = 120) -> Trellis:
    """The lines of descent; of a long run every n-th round is shown, with descent taken across the rounds between."""
    shown = spread(len(run.stories), most_rounds)
    round_of: list[int] = []
    rank: list[int] = []
    weight: list[float] = []
    moved: list[int] = []
    edges: list[tuple[int, int]] = []
    first_node = [0]
    for position, index in enumerate(shown):
        one = run.stories[index]
        count = len(one.weight)
        named = align(torch.from_numpy(one.assignment), run.num_clusters).numpy()
        round_of += [int(index) + 1] * count
        rank += range(count)
        weight += one.weight.tolist()
        moved += (named != named[0]).sum(1).tolist()
        if position:
            ancestor = np.arange(count)
            for step in range(index, shown[position - 1], -1):
                ancestor = run.stories[step].parent[ancestor]
            edges += [(first_node[-2] + int(a), first_node[-1] + h) for h, a in enumerate(ancestor)]
        first_node.append(first_node[-1] + count)
    edge_array = np.array(edges, dtype=np.int64).reshape(-1, 2)
    parent_of = dict(zip(edge_array[:, 1].tolist(), edge_array[:, 0].tolist(), strict=True))
    best_line, node = set(), first_node[-2] if len(shown) else None
    while node is not None:
        best_line.add(node)
        node = parent_of.get(node)
    nodes = np.arange(len(rank))
    in_last_round = nodes >= (first_node[-2] if len(shown) else 0)
    return Trellis(
        round=np.array(round_of, dtype=np.int64),
        rank=np.array(rank, dtype=np.int64),
        weight=np.array(weight),
        moved=np.array(moved, dtype=np.int64),
        edges=edge_array,
        on_best_line=np.isin(nodes, list(best_line)),
        pruned=~np.isin(nodes, edge_array[:, 0]) & ~in_last_round,
    )


@dataclass(frozen=True)
class Mark:
    """Something that happened in a round of a hypothesis, as a reader is told of it."""

    kind: str  # one of KINDS_OF_MARK
    round: int
    rank: int  # the hypothesis, heaviest first
    text: str


KINDS_OF_MARK = ("birth", "merge", "death", "newcomer", "drift", "followed")


def marks(run: Run) -> list[Mark]:
    """What happened to clusters and clients: one mark for each kind, round and hypothesis, in the order of rounds.

    Clusters are born, merged and given up where the method says so. What clients do is told of the heaviest hypothesis:
    a newcomer is first associated after round 1, a client drifts when its true group changes, and is followed when it
    is found with its new group.
    """
    told: dict[tuple[int, int, int], list[str]] = {}

    def tell(kind: str, round_index: int, rank: int, text: str) -> None:
        told.setdefault((round_index, rank, KINDS_OF_MARK.index(kind)), []).append(text)

    for index, one in enumerate(run.stories, 1):
        for event in (event for event in one.events if event["kind"] in KINDS_OF_MARK):
            tell(event["kind"], index, event["hypothesis"], _event_text(event))
        if index > 1:
            first = (one.assignment[0] >= 0) & (run.stories[index - 2].assignment[one.parent[0]] < 0)
            for client in np.flatnonzero(first).tolist():
                tell("newcomer", index, 0, f"client {client} joins cluster {one.assignment[0, client]}")
    if run.drift is not None:
        groups = run.groups
        assert groups is not None
        for client, waited in rounds_until_associated(run.placed, torch.from_numpy(groups)).items():
            change = int(np.flatnonzero(groups[:, client] != groups[0, client])[0]) + 1
            before, after = groups[change - 2, client], groups[change - 1, client]
            tell("drift", change, 0, f"client {client} changes from group {before} to group {after}")
            if waited is not None:
                when = "at once" if waited == 1 else f"in its round {waited}"
                tell("followed", change + waited - 1, 0, f"client {client} is found with group {after}, {when}")
    return [
        Mark(KINDS_OF_MARK[kind], round_index, rank, "<br>".join(texts))
        for (round_index, rank, kind), texts in sorted(told.items())
    ]


def _event_text(event: Mapping[str, Any]) -> str:
    """A birth, merge or death in words."""
    cluster, others = event["cluster"], ", ".join(str(one) for one in event.get("from", ()))
    return {
        "birth": f"cluster {cluster} is born" + (f" from cluster {others}" if others else ""),
        "merge": f"clusters {others} become cluster {cluster}",
        "death": f"cluster {cluster} is given up",
    }[event["kind"]]


@dataclass(frozen=True)
class ClientGraph:
    """Who shared a cluster with whom over the run; of many clients an even sample, of many edges the strongest."""

    client: Ints  # (node,) -> client
    colour_of: Ints  # (node,)
    place: Floats  # (node, 2) within the unit disc: near means often together
    edges: Ints  # (edge, 2) -> node, node; weakest first
    strength: Floats  # (edge,) accumulated co-association
    dropped: int  # edges that were too many to draw


FAINTEST = 0.01  # an edge of one hundredth of the full width cannot be seen


def client_graph(run: Run, most_nodes: int = 200, most_edges: int = 2500) -> ClientGraph:
    """The graph of the accumulated co-association, laid out so that distance tells how seldom two were together."""
    client = run.order[spread(run.num_clients, most_nodes)]
    shared = accumulated_co_association(run, client)
    first, second = np.triu_indices(len(client), 1)
    visible = shared[first, second] >= FAINTEST
    first, second = first[visible], second[visible]
    strength = shared[first, second]
    kept = np.argsort(strength, kind="stable")
    if len(strength) > most_edges:
        # Equal edges are many in a well-clustered run: drawn by lot, all clients keep some of theirs.
        lot = np.random.default_rng(0).permutation(len(strength))
        kept = np.lexsort((lot, strength))[-most_edges:]
    return ClientGraph(
        client=client,
        colour_of=run.colour_of[client],
        place=_place(shared),
        edges=np.stack([first, second], 1)[kept],
        strength=strength[kept],
        dropped=int(len(strength) - len(kept)),
    )


def _place(shared: Floats, steps: int = 300) -> Floats:
    """Points whose distances follow 1 − co-association: stress majorisation (SMACOF) from a circle."""
    count = len(shared)
    angle = 2 * np.pi * np.arange(count) / max(count, 1)
    place = np.stack([np.cos(angle), np.sin(angle)], 1)
    if count > 2:
        target = 0.7 + 1.1 * (1 - shared)  # a little room between clients that are always together
        for _ in range(steps):
            distance = np.sqrt(((place[:, None] - place) ** 2).sum(-1)) + np.eye(count)
            ratio = np.where(np.eye(count, dtype=bool), 0, target / np.maximum(distance, 1e-9))
            place = (ratio.sum(1)[:, None] * place - ratio @ place) / count
    place = place - place.mean(0)
    radius = np.sqrt((place**2).sum(1)).max() if count > 1 else 1.0
    placed: Floats = place / max(radius, 1e-9)
    return placed
