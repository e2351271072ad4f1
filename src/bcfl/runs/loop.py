"""A run from its settings to its result, with every round on disk."""

import logging
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bcfl.client.client import Layout, layout_of
from bcfl.data.datasets import full_name
from bcfl.data.lazy import Held, LazyClients
from bcfl.data.manifest import groups_in, manifest, verify_manifest
from bcfl.data.scales import remark_on_scales, scales_itself
from bcfl.engines.crew import find_device
from bcfl.engines.ray import Cluster, ray_simulator
from bcfl.engines.simulator import Simulator
from bcfl.federation import State
from bcfl.likelihood import CATEGORICAL, OWN, Likelihood, attach, parse
from bcfl.methods import method_of
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.model.zoo import SIZED
from bcfl.runs.course import Course, Engine, begin, drift_of, kept_rounds, last_info, placed_in, take_up
from bcfl.runs.environment import environment
from bcfl.runs.observers import Metrics, Observer, Store, Warnings, told_the_end
from bcfl.runs.packing import classes_of, unpack
from bcfl.runs.problem import NOTHING, Given, Problem, S, model_factory, prepare, sizes_of, split_seed
from bcfl.runs.records import read_manifest
from bcfl.runs.result import Result
from bcfl.runs.sections import FROM_PYTHON
from bcfl.runs.settings import Config, kept_config, load_named_plugin
from bcfl.runs.sites import FORM_FILE, Sites
from bcfl.runs.stopping import resumable
from bcfl.runs.store import Checkpoint, RunFolder, Standing

logger = logging.getLogger(__name__)


def start(
    config: Config,
    out: Path | None,
    *,
    given: Given = NOTHING,
    num_workers: int | None = None,
    device: str = "cpu",
    observers: Sequence[Observer] = (),
    way_on: str | None = None,
) -> Result:
    """Run from the beginning, into the folder `out` if given; nothing is written before the problem is sound.

    If it is stopped, its user is told the `way_on`: by itself that is to resume it.
    """
    find_device(device)
    problem = prepare(config, given)
    if remark := _on_scales(config, problem):
        logger.warning(remark)
    with _engine(config, problem, num_workers, device) as engine:
        if out is None:
            return _rounds(config, problem, engine, None, None, observers)
        folder = RunFolder.create(out, config.as_dict())
        with folder.locked(), resumable(folder, way_on or _how_to_resume(config, folder)):
            folder.refuse_if_begun()
            _describe(folder, _split(config, problem.data), problem.sites, environment(device, engine.at_a_time))
            return _rounds(config, problem, engine, folder, None, observers)


def resume(
    path: Path,
    *,
    config: Config | None = None,
    given: Given = NOTHING,
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
            return _kept_result(config, folder, checkpoint, given.factory)
        _refuse_federations(folder)
        problem = prepare(config, given)
        if folder.has("manifest.json"):
            _verify(problem.data, folder.read("manifest.json"))
        with (
            _engine(config, problem, num_workers, device) as engine,
            resumable(folder, way_on or _how_to_resume(config, folder)),
        ):
            if checkpoint:
                _sound_state(checkpoint, problem.method.classes, engine.layout, path)
            _go_back(folder, standing, device, engine.at_a_time)
            if not folder.has("manifest.json"):  # stopped before its first round
                _describe(folder, _split(config, problem.data), problem.sites, environment(device, engine.at_a_time))
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
    return kept_config(values)


def _go_back(folder: RunFolder, standing: Standing, device: str = "cpu", at_a_time: int = 1) -> None:
    """The folder is as it was at the run's checkpoint; what its user should know about that is told."""
    for note in standing.notes:
        logger.warning(note)
    folder.go_back_to(standing)
    if folder.has("environment.json"):
        before, now = (
            {"device": "cpu", "together": "1"} | folder.read("environment.json"),
            environment(device, at_a_time),
        )
        changed = [f"{key} {before.get(key)} is now {value}" for key, value in now.items() if before.get(key) != value]
        if changed:
            logger.warning(f"{folder.path}: the environment has changed, results may differ: {', '.join(changed)}")
            folder.write("environment.json", {**now, "before": [*before.pop("before", []), before]})


def _describe(folder: RunFolder, split: Mapping[str, Any], sites: Sites, made_with: Mapping[str, str]) -> None:
    """Beside its settings, the folder says what the run is made with, who holds what, and how a table is prepared."""
    folder.write("environment.json", made_with)
    if sites.form is not None:
        folder.write(FORM_FILE, sites.form.as_dict())
    folder.write("manifest.json", split)


def _verify(data: Held, kept: Mapping[str, Any]) -> None:
    """Nothing happens if the run was made with these data."""
    if isinstance(data, LazyClients):
        data.verify(kept)
    else:
        verify_manifest(data, kept)


def _split(config: Config, data: Held) -> dict[str, Any]:
    section = config.data
    if isinstance(data, LazyClients):
        return data.record()
    own = section.factory is not None
    origin = (data.description, "own") if own else (full_name(section.name, section.domains), section.partition)
    unnamed = own or section.name == "table"  # what no name tells from others, a digest of its content does
    record = manifest(data, *origin, split_seed(config), share_floor=section.share_floor, content=unnamed)
    return record | ({"sizes": sizes_of(data)} if config.model.name in SIZED else {})


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
            _sound_state(standing.checkpoint, problem.method.classes, engine.layout, out)
        _go_back(folder, standing)
        return _rounds(config, problem, engine, folder, standing.checkpoint, observers)


def is_unfinished(path: Path, config: Config) -> bool:
    """Whether `path` holds a run of exactly these settings that was begun and not completed."""
    folder = RunFolder(path)
    return folder.has("config.json") and not folder.complete and folder.read("config.json") == config.as_dict()


def _engine(config: Config, problem: Problem[Held], num_workers: int | None, device: str) -> Simulator:
    experiment = config.experiment
    participation = experiment.participation()
    cluster = Cluster.parse(device)
    if cluster is not None:
        return ray_simulator(
            cluster, problem.factory, problem.data, config.training, experiment.seed, participation, num_workers,
            experiment.together,
        )  # fmt: skip
    return Simulator(
        problem.factory,
        problem.data,
        config.training,
        experiment.seed,
        participation,
        num_workers,
        device,
        experiment.together,
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
    if checkpoint is not None and folder is not None:
        course = take_up(config, problem, engine, folder, checkpoint)
    else:
        try:
            course = begin(config, problem, engine)
        except Exception:  # the method does not suit the model, say, or the memory
            if folder and not folder.has("rounds.jsonl"):  # the run has never begun
                folder.clear()
            raise
    stores = [Store(course, folder, checkpoint is None)] if folder else []
    _follow(course, [Metrics(course), Warnings(course), *stores, *observers])
    return course.result(folder.path if folder else None)


def _follow(course: Course[S], observers: Sequence[Observer]) -> None:
    """All rounds that are left to do are done, and the observers have been told."""
    rounds = course.config.experiment.rounds
    with told_the_end(observers):
        if course.round < rounds:
            for observer in observers:
                observer.started(course.config, course.problem.data, course.round + 1)
        while course.round < rounds:
            began = time.perf_counter()
            record = course.go_on()
            for observer in observers:
                observer.round_done(record, time.perf_counter() - began)


def _on_scales(config: Config, problem: Problem[S]) -> str | None:
    """What is to be done about inputs that a model cannot learn from as they are; None of those of remote clients."""
    inputs = getattr(problem.data, "x_train", None)
    if inputs is None or scales_itself(build(problem.factory, config.experiment.seed, "probe")):
        return None
    return remark_on_scales(inputs)


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
    folder.refuse_changed_logs()  # which nothing repairs
    if checkpoint.round != config.experiment.rounds:
        raise ValueError(f"{path} holds no checkpoint of its last round; repair it with {how}")
    return _kept_result(config, folder, checkpoint, factory)


def _kept_result(config: Config, folder: RunFolder, checkpoint: Checkpoint, factory: ModelFactory | None) -> Result:
    kept = read_manifest(folder.path)
    sizes = kept.get("sizes")
    factory = factory or model_factory(config, None if sizes is None else (sizes[0], sizes[1]))
    factory = attach(factory, likelihood_in(folder))
    probe = FlatModel(build(factory, config.experiment.seed, "probe"))
    classes, layout = classes_of(method_of(config.method)), layout_of(probe, config.training)
    state = _sound_state(checkpoint, classes, layout, folder.path)
    history, told = kept_rounds(config, folder)
    groups = [groups_in(kept, index) for index in range(1, config.experiment.rounds + 1)]
    return Result(
        config,
        state,
        last_info(told),
        history,
        factory,
        groups[-1],
        folder.path,
        drift_of(config, placed_in(told), groups),
        Sites.kept(folder.path, kept),
    )


def likelihood_in(folder: RunFolder) -> Likelihood:
    """The likelihood of a kept run."""
    text = read_manifest(folder.path).get("likelihood", CATEGORICAL.spec)
    return CATEGORICAL if text == OWN else parse(text)  # one from Python is attached to the model there


def _sound_state(checkpoint: Checkpoint, classes: Iterable[type], layout: Layout, path: Path) -> State:
    """The state of the run in that folder, if its vectors mean here what they meant there."""
    try:
        state: State = unpack(checkpoint.state, classes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    length = state.hypotheses.models.mean.shape[1]
    layout.refuse_other(length, checkpoint.shapes, checkpoint.layers, f"in the run in {path}")
    return state
