"""A run from its settings to its result, with every round on disk."""

import errno
import importlib
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from bcfl.experiment.config import Config, parse_config
from bcfl.experiment.metrics import agreement, summarise
from bcfl.experiment.result import Result
from bcfl.experiment.store import Checkpoint, RunFolder
from bcfl.federation import Clients, Hypotheses, Method, RoundInfo, Work
from bcfl.local import Evaluation
from bcfl.methods import make_method
from bcfl.models import MODELS, ModelFactory, look_up

MODEL_FOR = {
    "digits": "mlp",
    "fashion_mnist": "fashion_cnn",
    "cifar10": "cifar_cnn",
    "amazon_review": "amazon_mlp",
    "digits_five": "digits_five_cnn",
}


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
    return Problem(data, factory, method)


def load_data(config: Config, clients: Sequence[Any] | None = None) -> FederatedData:
    """The configured data, cut into clients, or a user's own clients."""
    data = _whole_data(config, clients)
    return with_validation(data, config.data.validation, config.experiment.seed) if config.data.validation else data


def _whole_data(config: Config, clients: Sequence[Any] | None) -> FederatedData:
    section = config.data
    if clients is None and section.factory is not None:
        clients = import_object(section.factory, "data.factory")()
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
        return import_object(config.model.factory, "model.factory")
    if config.model.name != "auto":
        return look_up(config.model.name)
    if config.data.factory is not None or config.data.name not in MODEL_FOR:
        raise ValueError(f"model.name must be given for these data, one of: {', '.join(MODELS)} (or model.factory)")
    return MODELS[MODEL_FOR[config.data.name]]


def import_object(reference: str, key: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; the working directory counts as a place to look."""
    module_name, colon, name = reference.partition(":")
    if not colon or not name:
        raise ValueError(f"{key} must be package.module:function, got {reference!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key} {reference!r} cannot be imported: {error}") from error
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
            return _advance(config, problem, engine, None, None, observers)
        folder = RunFolder.create(out, config.as_dict())
        with folder.locked():
            folder.write("environment.json", environment())
            seed = config.experiment.seed if config.data.seed is None else config.data.seed
            name = config.data.name if clients is None and config.data.factory is None else problem.data.description
            split = manifest(problem.data, name, config.data.partition, seed, share_floor=config.data.share_floor)
            folder.write("manifest.json", split)
            return _advance(config, problem, engine, folder, None, observers)


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
    problem = prepare(config, clients, factory)
    verify_manifest(problem.data, folder.read("manifest.json"))
    with folder.locked(), _engine(config, problem, num_workers) as engine:
        return _advance(config, problem, engine, folder, folder.restore(), observers)


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
    if not is_unfinished(out, config):
        folder = RunFolder.create(out, config.as_dict())
        folder.write("environment.json", environment())
        folder.write("manifest.json", split)
    folder = RunFolder.open(out)
    for key, value in folder.read("manifest.json").items():
        if value != split[key]:
            raise ValueError(f"the run in {out} was begun with other clients: {key} was {value}, now {split[key]}")
    with folder.locked():
        return _advance(config, problem, engine, folder, folder.restore(), observers)


def is_unfinished(path: Path, config: Config) -> bool:
    """Whether `path` holds a run of exactly these settings that was begun and not completed."""
    if not (path / "manifest.json").is_file():
        return False
    folder = RunFolder.open(path)
    return not folder.complete and folder.read("config.json") == config.as_dict()


def _engine(config: Config, problem: Problem[FederatedData], num_workers: int | None) -> Simulator:
    experiment = config.experiment
    return Simulator(
        problem.factory, problem.data, config.training, experiment.seed, experiment.participation(), num_workers
    )


def _advance(
    config: Config,
    problem: Problem[S],
    engine: Engine,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    observers: Sequence[Observer],
) -> Result:
    """Round after round from the checkpoint, or from the beginning, to the end."""
    try:
        return _rounds(config, problem, engine, folder, checkpoint, observers)
    except OSError as error:
        where = f"; continue it with `bcfl resume {folder.path}`" if folder else ""
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise RunStoppedError(f"the run stopped: {reason}{where}") from error


def _rounds(
    config: Config,
    problem: Problem[S],
    engine: Engine,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    observers: Sequence[Observer],
) -> Result:
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
    for observer in observers:
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
    if not folder.complete:
        raise ValueError(f"the run in {path} is not complete; continue it with `bcfl resume {path}`")
    config = parse_config(folder.read("config.json"))
    checkpoint = folder.restore()
    if checkpoint is None:
        raise ValueError(f"the run in {path} has no sound checkpoint left")
    group = folder.read("manifest.json")["group"]
    return Result(
        config,
        checkpoint.state,
        _last_info(folder),
        folder.lines("rounds.jsonl"),
        factory or model_factory(config),
        None if group is None else torch.tensor(group),
        path,
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
