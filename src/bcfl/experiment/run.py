"""A run from its settings to its result, with every round on disk."""

import contextlib
import errno
import importlib
import logging
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from bcfl import __version__
from bcfl.association import align, num_hypotheses
from bcfl.data.arrays import from_arrays
from bcfl.data.datasets import DATASETS, load
from bcfl.data.manifest import manifest, verify_manifest
from bcfl.data.partition import FederatedData, partition, with_validation
from bcfl.engines.simulator import Simulator
from bcfl.experiment.config import FROM_PYTHON, Config, parse_config
from bcfl.experiment.metrics import agreement, summarise
from bcfl.experiment.result import Result
from bcfl.experiment.store import Checkpoint, RunFolder
from bcfl.federation import Clients, Hypotheses, Method, RoundInfo, Work
from bcfl.local import Evaluation
from bcfl.methods import make_method
from bcfl.models import MODELS, ModelFactory, look_up

logger = logging.getLogger(__name__)


class Split(Protocol):
    """What a server may know of the clients' data: how many hold some, what it is called, and perhaps true groups."""

    @property
    def num_clients(self) -> int: ...

    @property
    def description(self) -> str: ...

    @property
    def group(self) -> Tensor | None: ...  # (client,)


S = TypeVar("S", bound=Split)


class CountedClients(Clients, Protocol):
    """The federation in one round, with what it has cost so far."""

    work: Work


class Engine(Protocol):
    """Whoever answers for the clients: the simulator, or a real federation."""

    momentum: dict[int, dict[int, Tensor]]  # what clients keep, where the engine keeps it for them

    def begin(self, round_index: int) -> CountedClients: ...

    def evaluate(self, models: Tensor, model_of_client: Tensor) -> list[Evaluation | None]: ...


class Observer(Protocol):
    """Somebody who follows a run: a progress bar, a logger."""

    def started(self, config: Config, data: Split, first_round: int) -> None: ...

    def round_done(self, record: dict[str, Any], seconds: float) -> None: ...


class RunStoppedError(Exception):
    """A run could not go on, but nothing is lost: it can be resumed."""


@dataclass(frozen=True)
class Problem(Generic[S]):
    """What a configuration stands for: data, model and method, checked against each other."""

    data: S
    factory: ModelFactory
    method: Method


def prepare(
    config: Config, clients: Sequence[Any] | None = None, factory: ModelFactory | None = None
) -> Problem[FederatedData]:
    """The problem that `config` describes; a user's own clients and model take the place of named ones."""
    return pose(config, load_data(config, clients), factory or model_factory(config))


def pose(config: Config, data: S, factory: ModelFactory) -> Problem[S]:
    """The configured method on these data, if there are enough clients for it."""
    method = make_method(config.method["name"], {k: v for k, v in config.method.items() if k != "name"})
    num_clusters = getattr(method, "num_clusters", 1)
    if num_clusters > data.num_clients:
        raise ValueError(f"method.num_clusters is {num_clusters}, but there are only {data.num_clients} clients")
    max_hypotheses = getattr(method, "max_hypotheses", 1)
    possible = num_hypotheses(num_clusters, min(data.num_clients, 64), overlapping=False)
    if max_hypotheses > possible:
        raise ValueError(f"method {config.method['name']!r} keeps {max_hypotheses} hypotheses, but {data.num_clients} "
                         f"clients and {num_clusters} clusters allow only {possible}")  # fmt: skip
    if config.method.get("cluster_size") is not None:
        _check_cluster_size(config, num_clusters, data.num_clients)
    return Problem(data, factory, method)


def _check_cluster_size(config: Config, num_clusters: int, num_clients: int) -> None:
    """Nothing happens if every round has as many clients as clusters of that size can hold."""
    fewest, most = config.method["cluster_size"]
    participation, experiment = config.experiment.participation(), config.experiment
    for index in range(1, experiment.rounds + 1):
        present = int(participation.draw(num_clients, experiment.seed, index)[0].sum())
        if not fewest * num_clusters <= present <= most * num_clusters:
            raise ValueError(f"method.cluster_size [{fewest}, {most}] with {num_clusters} clusters takes "
                             f"{fewest * num_clusters} to {most * num_clusters} clients, but round {index} has "
                             f"{present}")  # fmt: skip


def load_data(config: Config, clients: Sequence[Any] | None = None) -> FederatedData:
    """The configured data, cut into clients, or a user's own clients."""
    data = _whole_data(config, clients)
    return with_validation(data, config.data.validation, config.experiment.seed) if config.data.validation else data


def _whole_data(config: Config, clients: Sequence[Any] | None) -> FederatedData:
    section = config.data
    if clients is None and section.factory is not None:
        clients = _users_function(section.factory, "data.factory", list)()
    if clients is not None:
        return from_arrays(clients)
    options = {"rotations": section.rotations, "domains": section.domains}
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    seed = config.experiment.seed if section.seed is None else section.seed
    if "seed" in (DATASETS[section.name].options if section.name in DATASETS else {}):
        given["seed"] = seed
    return partition(
        load(section.name, section.path, **given),
        section.partition,
        seed,
        share_floor=section.share_floor,
        min_examples=section.min_examples,
        path=section.partition_file,
        clients_per_group=section.clients_per_group,
    )


def model_factory(config: Config) -> ModelFactory:
    """The configured model, or the one that suits the configured data set."""
    if config.model.factory is not None:
        return _users_function(config.model.factory, "model.factory")
    if config.model.name == "auto":  # parse_config knows no model for these data
        raise ValueError(f"model.name must be given for these data, one of: {', '.join(MODELS)} (or model.factory)")
    return look_up(config.model.name)


def _users_function(reference: str, key: str, convert: Callable[[Any], Any] = lambda made: made) -> Callable[[], Any]:
    """The function that `package.module:function` names; whatever it raises becomes a ValueError that names it."""
    function = import_object(reference, key)

    def call() -> Any:
        try:
            return convert(function())
        except Exception as error:
            raise ValueError(f"{key} {reference!r} failed: {type(error).__name__}: {error}") from error

    return call


def import_object(reference: str, key: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; the working directory counts as a place to look."""
    if reference == FROM_PYTHON:
        raise ValueError(f"{key} was given in Python and must be given there again: bcfl.train(…, out=FOLDER) goes on "
                         f"with an unfinished run, bcfl.load(FOLDER, model) reads a complete one")  # fmt: skip
    module_name, colon, name = reference.partition(":")
    if not colon or not name:
        raise ValueError(f"{key} must be package.module:function, got {reference!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a module of the user's may raise anything
        raise ValueError(f"{key} {reference!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{key} {reference!r} must be a function, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def start(
    config: Config,
    out: Path | None,
    *,
    clients: Sequence[Any] | None = None,
    factory: ModelFactory | None = None,
    num_workers: int | None = None,
    observers: Sequence[Observer] = (),
) -> Result:
    """Run from the beginning, into the folder `out` if given; nothing is written before the problem is sound."""
    problem = prepare(config, clients, factory)
    with _engine(config, problem, num_workers) as engine:
        if out is None:
            return _rounds(config, problem, engine, None, None, observers)
        folder = RunFolder.create(out, config.as_dict())
        with folder.locked(), _resumable(folder, _how_to_resume(config, folder)):
            _describe(folder, _split(config, problem.data))
            return _rounds(config, problem, engine, folder, None, observers)


def resume(
    path: Path,
    *,
    clients: Sequence[Any] | None = None,
    factory: ModelFactory | None = None,
    num_workers: int | None = None,
    observers: Sequence[Observer] = (),
) -> Result:
    """Go on where the run in `path` was stopped; a complete run is only read."""
    folder = RunFolder.open(path)
    config = parse_config(folder.read("config.json"))
    with folder.locked():
        checkpoint = _restore(folder)
        if folder.complete and checkpoint and checkpoint.round == config.experiment.rounds:
            return _kept_result(config, folder, checkpoint, factory)
        problem = prepare(config, clients, factory)
        if folder.has("manifest.json"):
            verify_manifest(problem.data, folder.read("manifest.json"))
        with (
            _engine(config, problem, num_workers) as engine,
            _resumable(folder, _how_to_resume(config, folder)),
        ):
            if checkpoint and checkpoint.state.models.mean.shape[1] != engine.layout.length:
                raise ValueError(f"the model has {engine.layout.length} numbers, but in the run in {path} it had "
                                 f"{checkpoint.state.models.mean.shape[1]}")  # fmt: skip
            if not folder.has("manifest.json"):  # stopped before its first round
                _describe(folder, _split(config, problem.data))
            return _rounds(config, problem, engine, folder, checkpoint, observers)


def _restore(folder: RunFolder) -> Checkpoint | None:
    """Where the run stands; what its user should know about that is told."""
    checkpoint = folder.restore()
    for note in folder.notes:
        logger.warning(note)
    if folder.has("environment.json"):
        before, now = folder.read("environment.json"), environment()
        changed = [f"{key} {before.get(key)} is now {value}" for key, value in now.items() if before.get(key) != value]
        if changed and not folder.complete:
            logger.warning(f"{folder.path}: the environment has changed, results may differ: {', '.join(changed)}")
    return checkpoint


def _describe(folder: RunFolder, split: Mapping[str, Any]) -> None:
    """Beside its settings, the folder says what the run is made with and who holds what."""
    folder.write("environment.json", environment())
    folder.write("manifest.json", split)


def _split(config: Config, data: FederatedData) -> dict[str, Any]:
    section = config.data
    origin = (section.name, section.partition) if section.factory is None else (data.description, "own")
    seed = config.experiment.seed if section.seed is None else section.seed
    return manifest(data, *origin, seed, share_floor=section.share_floor)


def _how_to_resume(config: Config, folder: RunFolder) -> str:
    if FROM_PYTHON in (config.data.factory, config.model.factory):
        return f"bcfl.train(…, out={str(folder.path)!r})"
    return f"`bcfl resume {shlex.quote(str(folder.path))}`"


@contextlib.contextmanager
def _resumable(folder: RunFolder, how: str) -> Iterator[None]:
    """Whatever stops a run in here, its user is told how it goes on."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise RunStoppedError(f"the run in {folder.path} stopped: {reason}; continue it with {how}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"continue the run with {how}") from None


def run_on(
    engine: Engine,
    config: Config,
    problem: Problem[S],
    out: Path,
    split: Mapping[str, Any],
    observers: Sequence[Observer] = (),
) -> Result:
    """Run on that engine into the folder `out`; if it holds this very run, unfinished, go on from there.

    `split` is what the engine knows of who holds what; a run is gone on with only if that is still the same.
    """
    folder = RunFolder.open(out) if is_unfinished(out, config) else RunFolder.create(out, config.as_dict())
    with folder.locked(), _resumable(folder, f"the same settings and folder {out}"):
        checkpoint = _restore(folder)
        if not folder.has("manifest.json"):
            _describe(folder, split)
        for key, value in folder.read("manifest.json").items():
            now = split.get(key)
            if None not in (value, now) and value != now:  # None: not known, as the groups while a client is away
                raise ValueError(f"the run in {out} was begun with other clients: {key} was {value}, now {now}")
        return _rounds(config, problem, engine, folder, checkpoint, observers)


def is_unfinished(path: Path, config: Config) -> bool:
    """Whether `path` holds a run of exactly these settings that was begun and not completed."""
    folder = RunFolder(path)
    return folder.has("config.json") and not folder.complete and folder.read("config.json") == config.as_dict()


def _engine(config: Config, problem: Problem[FederatedData], num_workers: int | None) -> Simulator:
    experiment = config.experiment
    return Simulator(
        problem.factory, problem.data, config.training, experiment.seed, experiment.participation(), num_workers
    )


def _rounds(
    config: Config,
    problem: Problem[S],
    engine: Engine,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    observers: Sequence[Observer],
) -> Result:
    """Round after round from the checkpoint, or from the beginning, to the end."""
    experiment, method = config.experiment, problem.method
    history: list[dict[str, Any]] = []
    if checkpoint is None:
        clients = engine.begin(0)
        state, info = method.init(clients), None
        history.append({"round": 0, "work": clients.work.as_dict()})
        if folder:
            folder.append("rounds.jsonl", history[0])
            folder.save_checkpoint(Checkpoint(0, state, engine.momentum))
        first = 1
    else:
        assert folder is not None
        state, engine.momentum, first = checkpoint.state, checkpoint.momentum, checkpoint.round + 1
        history, info = folder.lines("rounds.jsonl"), _last_info(folder)
    for observer in observers if first <= experiment.rounds else ():
        observer.started(config, problem.data, first)
    for index in range(first, experiment.rounds + 1):
        began, before = time.perf_counter(), state.assignment[0]
        clients = engine.begin(index)
        state, info = method.round(state, clients)
        record: dict[str, Any] = {"round": index, "work": clients.work.as_dict()}
        record |= _association_record(state, before, problem.data)
        if index % experiment.evaluate_every == 0 or index == experiment.rounds:
            record |= summarise(engine.evaluate(*state.predictors()))
        history.append(record)
        seconds = time.perf_counter() - began
        if folder:
            folder.append("rounds.jsonl", record)
            folder.append("associations.jsonl", _info_record(index, info))
            folder.append("timings.jsonl", {"round": index, "seconds": seconds})
            if index % experiment.checkpoint_every == 0 or index == experiment.rounds:
                folder.save_checkpoint(Checkpoint(index, state, engine.momentum))
        for observer in observers:
            observer.round_done(record, seconds)
    result = Result(config, state, info, history, problem.factory, problem.data.group, folder.path if folder else None)
    if folder and not folder.complete:
        folder.write("result.json", result.summary())
    return result


def _association_record(state: Hypotheses, before: Tensor, data: Split) -> dict[str, Any]:
    """How the best hypothesis' assignment stands: what changed, and whether it agrees with the true groups."""
    now = state.assignment[0]
    num_clusters = max(state.num_clusters, int(max(now.max(), before.max())) + 1)
    same_numbers = align(torch.stack([before, now]), num_clusters)
    return {
        "num_hypotheses": len(state.log_weight),
        "num_beliefs": len(state.models),
        "changes": int((same_numbers[0] != same_numbers[1]).sum()),
        "ari": None if data.group is None else agreement(now, data.group),
    }


def _info_record(index: int, info: RoundInfo) -> dict[str, Any]:
    return {
        "round": index,
        "parent": info.parent.tolist(),
        "log_weight": info.log_weight.tolist(),
        "assignment": info.assignment.tolist(),
    }


def _last_info(folder: RunFolder) -> RoundInfo | None:
    lines = folder.lines("associations.jsonl")
    if not lines:
        return None
    last = lines[-1]
    return RoundInfo(
        torch.tensor(last["parent"]),
        torch.tensor(last["assignment"]),
        torch.tensor(last["log_weight"], dtype=torch.float64),
    )


def load_result(path: Path, factory: ModelFactory | None = None) -> Result:
    """The result of a complete run, read from its folder; no data set is needed."""
    folder = RunFolder.open(path)
    config = parse_config(folder.read("config.json"))
    how = _how_to_resume(config, folder)
    if not folder.complete:
        raise ValueError(f"the run in {path} is not complete; continue it with {how}")
    try:
        checkpoint = folder.last_checkpoint()
    except ValueError as error:
        raise ValueError(f"{error}; repair it with {how}") from None
    return _kept_result(config, folder, checkpoint, factory)


def _kept_result(config: Config, folder: RunFolder, checkpoint: Checkpoint, factory: ModelFactory | None) -> Result:
    group = folder.read("manifest.json")["group"]
    return Result(
        config,
        checkpoint.state,
        _last_info(folder),
        folder.lines("rounds.jsonl"),
        factory or model_factory(config),
        None if group is None else torch.tensor(group),
        folder.path,
    )


def environment() -> dict[str, str]:
    """What the run was made with, for whoever wants to repeat it."""
    return {
        "bcfl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
    }
