"""A run from its settings to its result, with every round on disk."""

import logging
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bcfl.association.hypotheses import align
from bcfl.belief.gaussian import Gaussian, distinct
from bcfl.client.client import Layout, layout_of
from bcfl.client.score import Evaluation
from bcfl.client.stacked import find_device
from bcfl.data.datasets import full_name
from bcfl.data.manifest import groups_in, manifest, verify_manifest
from bcfl.data.partition import FederatedData
from bcfl.data.scales import remark_on_scales, scales_itself
from bcfl.engines.heap import physical_memory
from bcfl.engines.simulator import Simulator
from bcfl.federation import Clients, Hypotheses, Mixture, RoundInfo, Work
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.predict.metrics import agreement, follow_drift, summarise
from bcfl.predict.predictors import mixtures
from bcfl.runs.environment import environment
from bcfl.runs.problem import Problem, S, Split, model_factory, prepare, split_seed
from bcfl.runs.records import read_associations, read_manifest, read_rounds
from bcfl.runs.result import Result
from bcfl.runs.settings import FROM_PYTHON, Config, load_named_plugin, parse_config
from bcfl.runs.stopping import resumable
from bcfl.runs.store import Checkpoint, RunFolder, Standing

BELIEFS_SHARE = 0.8  # of the machine's memory: the rest is for data and for trainings under way

logger = logging.getLogger(__name__)


class CountedClients(Clients, Protocol):
    """The federation in one round, with what it has cost so far."""

    work: Work


class Engine(Protocol):
    """Whoever answers for the clients: the simulator, or a real federation."""

    layout: Layout
    momentum: dict[int, dict[int, Tensor]]  # what clients keep, where the engine keeps it for them

    def begin(self, round_index: int) -> CountedClients: ...

    def evaluate(
        self, models: Tensor, mixtures: Sequence[Mixture], round_index: int = 0
    ) -> list[Evaluation | None]: ...


class Observer(Protocol):
    """Somebody who follows a run: a progress bar, a logger."""

    def started(self, config: Config, data: Split, first_round: int) -> None: ...

    def round_done(self, record: dict[str, Any], seconds: float) -> None: ...


def start(
    config: Config,
    out: Path | None,
    *,
    clients: Iterable[Any] | None = None,
    factory: ModelFactory | None = None,
    num_workers: int | None = None,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    way_on: str | None = None,
) -> Result:
    """Run from the beginning, into the folder `out` if given; nothing is written before the problem is sound.

    If it is stopped, its user is told the `way_on`: by itself that is to resume it.
    """
    find_device(device)
    problem = prepare(config, clients, factory)
    if remark := _on_scales(config, problem):
        logger.warning(remark)
    with _engine(config, problem, num_workers, device) as engine:
        if out is None:
            return _rounds(config, problem, engine, None, None, observers)
        folder = RunFolder.create(out, config.as_dict())
        with folder.locked(), resumable(folder, way_on or _how_to_resume(config, folder)):
            folder.refuse_if_begun()
            _describe(folder, _split(config, problem.data), device)
            return _rounds(config, problem, engine, folder, None, observers)


def resume(
    path: Path,
    *,
    config: Config | None = None,
    clients: Iterable[Any] | None = None,
    factory: ModelFactory | None = None,
    num_workers: int | None = None,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    way_on: str | None = None,
) -> Result:
    """Go on where the run in `path` was stopped; a complete run is only read.

    `config` are its settings, if the same data lie elsewhere now (data.path): nothing else may differ from the kept
    ones. Until everything that the run needs is there, nothing in the folder is touched.
    """
    find_device(device)
    folder = RunFolder.open(path)
    kept = settings_of(path)
    if config is not None and config.identity() != kept.identity():
        raise ValueError(f"the run in {path} has other settings: only data.path may be another")
    config = config or kept
    with folder.locked():
        standing = folder.standing()
        checkpoint = standing.checkpoint
        if folder.complete and checkpoint and checkpoint.round == config.experiment.rounds:
            return _kept_result(config, folder, checkpoint, factory)
        _refuse_federations(folder)
        problem = prepare(config, clients, factory)
        if folder.has("manifest.json"):
            verify_manifest(problem.data, folder.read("manifest.json"))
        with (
            _engine(config, problem, num_workers, device) as engine,
            resumable(folder, way_on or _how_to_resume(config, folder)),
        ):
            if checkpoint:
                _refuse_other_model(checkpoint, engine.layout, path)
            _go_back(folder, standing, device)
            if not folder.has("manifest.json"):  # stopped before its first round
                _describe(folder, _split(config, problem.data), device)
            return _rounds(config, problem, engine, folder, checkpoint, observers)


def prolong(path: Path, out: Path, config: Config) -> None:
    """The folder `out` for a run like the one in `path` with more rounds: it begins where that one has come to."""
    source, kept = RunFolder.open(path), settings_of(path)
    if config.identity() != kept.with_rounds(config.experiment.rounds).identity():
        raise ValueError(f"the run in {path} has other settings: only the number of rounds may be another")
    if config.experiment.rounds <= kept.experiment.rounds:
        raise ValueError(f"the run in {path} has {kept.experiment.rounds} rounds: more than these must be asked for, "
                         f"not {config.experiment.rounds}")  # fmt: skip
    _refuse_federations(source)
    with source.locked():
        standing = source.standing()
        if standing.checkpoint is None:
            raise ValueError(f"the run in {path} has trained nothing yet that could be gone on with")
        for note in standing.notes:
            logger.warning(note)
        folder = RunFolder.create(out, config.as_dict())
        with folder.locked():
            folder.refuse_if_begun()
            folder.take_over(source, standing)


def _refuse_federations(folder: RunFolder) -> None:
    """Nothing happens if the run can go on here: of a federation's run the data are not here, but with its clients."""
    if folder.of_federation:
        raise ValueError(f"the run in {folder.path} is a federation's, whose clients have its data: start the "
                         "federation again to go on with it")  # fmt: skip


def settings_of(path: Path) -> Config:
    """The settings of the run in a folder."""
    values = RunFolder.open(path).read("config.json")
    load_named_plugin(values)
    return parse_config(values)


def _go_back(folder: RunFolder, standing: Standing, device: str = "cpu") -> None:
    """The folder is as it was at the run's checkpoint; what its user should know about that is told."""
    for note in standing.notes:
        logger.warning(note)
    folder.go_back_to(standing)
    if folder.has("environment.json"):
        before, now = {"device": "cpu"} | folder.read("environment.json"), environment(device)
        changed = [f"{key} {before.get(key)} is now {value}" for key, value in now.items() if before.get(key) != value]
        if changed:
            logger.warning(f"{folder.path}: the environment has changed, results may differ: {', '.join(changed)}")
            folder.write("environment.json", {**now, "before": [*before.pop("before", []), before]})


def _describe(folder: RunFolder, split: Mapping[str, Any], device: str = "cpu") -> None:
    """Beside its settings, the folder says what the run is made with and who holds what."""
    folder.write("environment.json", environment(device))
    folder.write("manifest.json", split)


def _split(config: Config, data: FederatedData) -> dict[str, Any]:
    section = config.data
    own = section.factory is not None
    origin = (data.description, "own") if own else (full_name(section.name, section.domains), section.partition)
    return manifest(data, *origin, split_seed(config), share_floor=section.share_floor, content=own)


def _how_to_resume(config: Config, folder: RunFolder) -> str:
    if FROM_PYTHON in (config.data.factory, config.model.factory):
        return f"bcfl.train(…, out={str(folder.path)!r})"
    moved = config.data.path if config.data.path != settings_of(folder.path).data.path else None
    options = "" if moved is None else f" --data-path {shlex.quote(moved)}"
    return f"`bcfl resume {shlex.quote(str(folder.path))}{options}`"


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
    folder = RunFolder.open(out) if is_unfinished(out, config) else RunFolder.create(out, config.as_dict(), split)
    if not folder.of_federation:
        raise ValueError(f"the run in {out} was begun on one machine, and these clients' data may be others: choose "
                         "another folder")  # fmt: skip
    with folder.locked(), resumable(folder, f"the same settings and folder {out}"):
        standing = folder.standing()
        if not folder.has("environment.json"):
            folder.write("environment.json", environment())
        for key, value in folder.read("manifest.json").items():
            now = split.get(key)
            if None not in (value, now) and value != now:  # None: not known, as the groups while a client is away
                raise ValueError(f"the run in {out} was begun with other clients: {key} was {value}, now {now}")
        if standing.checkpoint:
            _refuse_other_model(standing.checkpoint, engine.layout, out)
        _go_back(folder, standing)
        return _rounds(config, problem, engine, folder, standing.checkpoint, observers)


def is_unfinished(path: Path, config: Config) -> bool:
    """Whether `path` holds a run of exactly these settings that was begun and not completed."""
    folder = RunFolder(path)
    return folder.has("config.json") and not folder.complete and folder.read("config.json") == config.as_dict()


def _engine(config: Config, problem: Problem[FederatedData], num_workers: int | None, device: str) -> Simulator:
    experiment = config.experiment
    participation = experiment.participation()
    return Simulator(
        problem.factory, problem.data, config.training, experiment.seed, participation, num_workers, device
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
    model_is = engine.layout.shapes, engine.layout.layers
    history: list[dict[str, Any]] = []
    placed: list[Tensor] = []  # where the best hypothesis had every client, round by round
    if checkpoint is None:
        clients = engine.begin(0)
        try:
            state, info = method.init(clients), None
            _refuse_other(config, "init", state, Hypotheses)
        except Exception:  # it does not suit the model, say, or the memory
            if folder and not folder.has("rounds.jsonl"):  # the run has never begun
                folder.clear()
            raise
        history.append({"round": 0, "work": clients.work.as_dict()})
        _tell_rejected([], history[0], config.method.get("fusion"))  # in a warm-up
        if folder:
            folder.append("rounds.jsonl", history[0])
            folder.save_checkpoint(Checkpoint(0, state, engine.momentum, *model_is))
        first = 1
    else:
        assert folder is not None
        state, engine.momentum, first = checkpoint.state, checkpoint.momentum, checkpoint.round + 1
        history, told = _kept_rounds(config, folder)
        info, placed = _last_info(told), _placed(told)
    _tell_memory(state.models)
    for observer in observers if first <= experiment.rounds else ():
        observer.started(config, problem.data, first)
    for index in range(first, experiment.rounds + 1):
        began, before = time.perf_counter(), state.assignment[0]
        clients = engine.begin(index)
        made = method.round(state, clients)
        _refuse_other(config, "round", made, Hypotheses, RoundInfo)
        state, info = made
        placed.append(state.assignment[0])
        record: dict[str, Any] = {"round": index, "work": clients.work.as_dict()}
        record |= _association_record(state, before, problem.data.group_in(index))
        if index % experiment.evaluate_every == 0 or index == experiment.rounds:
            record |= summarise(engine.evaluate(*state.points(), index))
            if experiment.mixture:
                record["mixture"] = summarise(engine.evaluate(*mixtures(state, info), index))
        _tell_rejected(history, record, config.method.get("fusion"))
        history.append(record)
        seconds = time.perf_counter() - began
        if folder:
            folder.append("rounds.jsonl", record)
            folder.append("associations.jsonl", _info_record(index, info))
            folder.append("timings.jsonl", {"round": index, "seconds": seconds})
            if index % experiment.checkpoint_every == 0 or index == experiment.rounds:
                folder.save_checkpoint(Checkpoint(index, state, engine.momentum, *model_is))
        for observer in observers:
            observer.round_done(record, seconds)
    _refuse_if_nothing_learned(history, folder)
    groups = [problem.data.group_in(index) for index in range(1, experiment.rounds + 1)]
    drift = _drift(config, placed, groups)
    path = folder.path if folder else None
    result = Result(config, state, info, history, problem.factory, groups[-1], path, drift)
    if folder and not folder.complete:
        folder.write("result.json", result.summary())
    return result


def _refuse_other(config: Config, function: str, made: Any, *kinds: type) -> None:
    """Nothing happens if a method's function has made what the loop goes on with."""
    found = made if isinstance(made, tuple) else (made,)
    if len(found) != len(kinds) or not all(map(isinstance, found, kinds)):
        wanted, got = (", ".join(kind.__name__ for kind in names) for names in (kinds, map(type, found)))
        raise ValueError(f"method {config.method['name']!r}: {function} must return {wanted} (bcfl.federation), but "
                         f"returned {got or 'an empty tuple'}")  # fmt: skip


def _tell_memory(models: Gaussian) -> None:
    """Whoever has hardly room for the next round's beliefs is told: the system would end the run without a word."""
    needed, there = 2 * (models.mean.nbytes + distinct(models.precision).nbytes), physical_memory()
    if there is not None and needed > BELIEFS_SHARE * there:
        logger.warning(f"{len(models)} beliefs before and after a round take {needed / 1e9:.1f} GB of this machine's "
                       f"{there / 1e9:.1f}: take a smaller model, or fewer clusters or hypotheses")  # fmt: skip


def _on_scales(config: Config, problem: Problem[S]) -> str | None:
    """What is to be done about inputs that a model cannot learn from as they are; None of those of remote clients."""
    inputs = getattr(problem.data, "x_train", None)
    if inputs is None or scales_itself(build(problem.factory, config.experiment.seed, "probe")):
        return None
    return remark_on_scales(inputs)


def _learned(record: Mapping[str, Any]) -> bool:
    work = record["work"]
    return bool(work["trainings"] > work["rejected"])


def _refuse_if_nothing_learned(history: Sequence[Mapping[str, Any]], folder: RunFolder | None) -> None:
    """Nothing happens if any training of the run has brought anything: figures of first models would look like it."""
    if not any(map(_learned, history)):
        kept = f"; what was tried is in {folder.path}" if folder else ""
        trainings = sum(record["work"]["trainings"] for record in history)
        raise ValueError(f"nothing was ever learned: none of {trainings} trainings in {history[-1]['round']} rounds "
                         f"stayed finite{kept}")  # fmt: skip


def _tell_rejected(history: Sequence[Mapping[str, Any]], record: Mapping[str, Any], fusion: str | None) -> None:
    """The first round in which trainings went off is told, with what to try; one that taught nothing, every time."""
    work, said = record["work"], []
    if record["round"] and not _learned(record):
        said.append("nothing was learned")
    if work["rejected"] and (said or not any(past["work"]["rejected"] for past in history)):
        said.append(f"{work['rejected']} of {work['trainings']} trainings did not stay finite and are left out")
    if said and not any(past["work"]["rejected"] for past in history):
        remedy = "inputs of another scale, or a smaller training.learning_rate"
        if fusion == "product":  # of a cluster of n it multiplies the precision by n(1 − forgetting) each round
            remedy += ", or method.forgetting near 1: with method.fusion product precisions may grow without end"
        said.append(f"try {remedy}")
    if said:
        logger.warning(f"round {record['round']}: {': '.join(said)}")


def _association_record(state: Hypotheses, before: Tensor, group: Tensor | None) -> dict[str, Any]:
    """How the best hypothesis' assignment stands: what changed, and whether it agrees with the true groups."""
    now = state.assignment[0]
    num_clusters = max(state.num_clusters, int(max(now.max(), before.max())) + 1)
    same_numbers = align(torch.stack([before, now]), num_clusters)
    return {
        "num_hypotheses": int(state.log_weight.isfinite().sum()),  # without what is only proposed
        "num_beliefs": len(state.models),
        "changes": int((same_numbers[0] != same_numbers[1]).sum()),
        "ari": None if group is None else agreement(now, group),
    }


def _info_record(index: int, info: RoundInfo) -> dict[str, Any]:
    record: dict[str, Any] = {
        "round": index,
        "parent": info.parent.tolist(),
        "log_weight": info.log_weight.tolist(),
        "assignment": info.assignment.tolist(),
    }
    return record if info.events is None else {**record, "events": list(info.events)}


def _kept_rounds(config: Config, folder: RunFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and the hypotheses of every round so far."""
    clients, asked = read_manifest(folder.path)["num_clients"], config.method.get("num_clusters") or 1
    return read_rounds(folder.path, clients), read_associations(folder.path, clients, asked)


def _last_info(lines: Sequence[Mapping[str, Any]]) -> RoundInfo | None:
    if not lines:
        return None
    last = lines[-1]
    return RoundInfo(
        torch.tensor(last["parent"]),
        torch.tensor(last["assignment"]),
        torch.tensor(last["log_weight"], dtype=torch.float64),
        tuple(last["events"]) if "events" in last else None,
    )


def _placed(lines: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Where the best hypothesis had every client, round by round."""
    return [torch.tensor(line["assignment"][0]) for line in lines]


def _drift(config: Config, placed: Sequence[Tensor], groups: Sequence[Tensor | None]) -> dict[str, Any] | None:
    """How the run followed a change of the true groups; None without one, or where there is nothing to associate."""
    known = [group for group in groups if group is not None]
    if config.data.drift_round is None or len(known) < len(groups):
        return None
    return follow_drift(torch.stack(list(placed)), torch.stack(known))


def load_result(path: Path, factory: ModelFactory | None = None) -> Result:
    """The result of a complete run, read from its folder; no data set is needed."""
    folder = RunFolder.open(path)
    config = settings_of(path)
    how = _how_to_resume(config, folder)
    if not folder.complete:
        raise ValueError(f"the run in {path} is not complete; continue it with {how}")
    try:
        checkpoint = folder.last_checkpoint()
    except ValueError as error:
        raise ValueError(f"{error}; repair it with {how}") from None
    if checkpoint.round != config.experiment.rounds:
        raise ValueError(f"{path} holds no checkpoint of its last round; repair it with {how}")
    return _kept_result(config, folder, checkpoint, factory)


def _kept_result(config: Config, folder: RunFolder, checkpoint: Checkpoint, factory: ModelFactory | None) -> Result:
    factory = factory or model_factory(config)
    probe = FlatModel(build(factory, config.experiment.seed, "probe"))
    _refuse_other_model(checkpoint, layout_of(probe, config.training), folder.path)
    kept, (history, told) = read_manifest(folder.path), _kept_rounds(config, folder)
    groups = [groups_in(kept, index) for index in range(1, config.experiment.rounds + 1)]
    return Result(
        config,
        checkpoint.state,
        _last_info(told),
        history,
        factory,
        groups[-1],
        folder.path,
        _drift(config, _placed(told), groups),
    )


def _refuse_other_model(checkpoint: Checkpoint, layout: Layout, path: Path) -> None:
    length = checkpoint.state.models.mean.shape[1]
    layout.refuse_other(length, checkpoint.shapes, checkpoint.layers, f"in the run in {path}")
