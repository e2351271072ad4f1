"""A run on its way: what its loop moves on from round to round, and what its observers look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from bcfl.association.membership import read
from bcfl.belief.heads import Heads
from bcfl.client.client import Layout
from bcfl.federation import Clients, Mixture, RoundInfo, State, Work
from bcfl.likelihood.measures import Evaluation
from bcfl.predict.metrics import follow_drift
from bcfl.runs.packing import pack, unpack
from bcfl.runs.problem import Problem, S
from bcfl.runs.records import read_associations, read_manifest, read_rounds
from bcfl.runs.result import Result
from bcfl.runs.settings import Config
from bcfl.runs.store import Checkpoint, RunFolder


class CountedClients(Clients, Protocol):
    """The federation in one round, with what it has cost so far."""

    work: Work


class Engine(Protocol):
    """Whoever answers for the clients: the simulator, or a real federation."""

    layout: Layout
    momentum: dict[int, dict[int, Tensor]]  # what clients keep, where the engine keeps it for them

    def begin(self, round_index: int) -> CountedClients: ...

    def evaluate(
        self, models: Tensor, mixtures: Sequence[Mixture], round_index: int = 0, who: Tensor | None = None
    ) -> list[Evaluation | None]: ...

    def evaluate_heads(
        self, heads: Heads, round_index: int = 0, who: Tensor | None = None
    ) -> list[Evaluation | None]: ...


@dataclass
class Course(Generic[S]):
    """Where a run stands, and the way there."""

    config: Config
    problem: Problem[S]
    engine: Engine
    state: State
    info: RoundInfo | None = None  # the last round's associations
    history: list[dict[str, Any]] = field(default_factory=list)  # a record for each round, round 0 first
    present: Tensor | None = None  # (client,) bool: who took part in the last round
    placed: list[Tensor] = field(default_factory=list)  # where the best hypothesis had the clients, where they drift

    @property
    def round(self) -> int:
        """The last round that is done."""
        return len(self.history) - 1

    def go_on(self) -> dict[str, Any]:
        """The next round is done; its record, to which observers add."""
        clients = self.engine.begin(self.round + 1)
        self.state, self.info = self.problem.method.round(self.state, clients)
        self.present = clients.present
        if self.config.data.drift_round is not None:
            self.placed.append(self.state.hypotheses.assignment[0])
        self.history.append({"round": self.round + 1, "work": clients.work.as_dict()})
        return self.history[-1]

    def checkpoint(self) -> Checkpoint:
        layout = self.engine.layout
        return Checkpoint(self.round, pack(self.state), self.engine.momentum, layout.shapes, layout.layers)

    def result(self, path: Path | None) -> Result:
        """What the run has come to, kept in the folder `path`."""
        groups = [self.problem.data.group_in(index) for index in range(1, self.round + 1)]
        drift = drift_of(self.config, self.placed, groups)
        sites = self.problem.sites
        return Result(
            self.config, self.state, self.info, self.history, self.problem.factory, groups[-1], path, drift, sites
        )


def begin(config: Config, problem: Problem[S], engine: Engine) -> Course[S]:
    """A new run after its round 0, which is a warm-up where there is one."""
    clients = engine.begin(0)
    state = problem.method.init(clients)
    return Course(config, problem, engine, state, history=[{"round": 0, "work": clients.work.as_dict()}])


def take_up(
    config: Config, problem: Problem[S], engine: Engine, folder: RunFolder, checkpoint: Checkpoint
) -> Course[S]:
    """The run in a folder that has gone back to this checkpoint."""
    engine.momentum = checkpoint.momentum
    history, told = kept_rounds(config, folder)
    state = unpack(checkpoint.state, problem.method.classes)
    return Course(config, problem, engine, state, last_info(told), history, placed=placed_in(told))


def kept_rounds(config: Config, folder: RunFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and the hypotheses of every round so far."""
    clients, asked = read_manifest(folder.path)["num_clients"], config.method.get("num_clusters") or 1
    return read_rounds(folder.path, clients), read_associations(folder.path, clients, asked)


def last_info(lines: Sequence[Mapping[str, Any]]) -> RoundInfo | None:
    """The last round's associations, by the lines of associations.jsonl; None of a run without rounds."""
    if not lines:
        return None
    last = lines[-1]
    parent = torch.tensor(last["parent"])
    return RoundInfo(
        parent,
        torch.tensor(last["assignment"]),
        torch.tensor(last["log_weight"], dtype=torch.float64),
        tuple(last["events"]) if "events" in last else None,
        read(last["probability"], parent) if "probability" in last else None,
    )


def placed_in(lines: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Where the best hypothesis had every client, round by round."""
    return [torch.tensor(line["assignment"][0]) for line in lines]


def drift_of(config: Config, placed: Sequence[Tensor], groups: Sequence[Tensor | None]) -> dict[str, Any] | None:
    """How the run followed a change of the true groups; None without one, or where there is nothing to associate."""
    known = [group for group in groups if group is not None]
    if config.data.drift_round is None or len(known) < len(groups):
        return None
    return follow_drift(torch.stack(list(placed)), torch.stack(known))
