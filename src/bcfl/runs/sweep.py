"""Many runs, none of them twice: each has a folder named by its settings, so what is done is found again."""

import contextlib
import copy
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bcfl.client import trainer as local
from bcfl.client.stacked import find_device
from bcfl.client.trainer import Examples
from bcfl.data.datasets import DATASETS
from bcfl.data.manifest import verify_manifest
from bcfl.data.partition import FederatedData, parse_specification
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.runs.loop import Observer, resume, start
from bcfl.runs.problem import Split, load_data, model_factory, pose, set_up_memory, split_seed
from bcfl.runs.settings import (
    Config,
    DataConfig,
    parse_config,
    parse_override,
    read_toml,
    refuse_ignored,
    refuse_unknown,
    set_value,
)
from bcfl.runs.stopping import DISK_IS_FULL, RunStoppedError
from bcfl.runs.store import RunFolder, TakenError

# What may differ between runs that are averaged: who drew the numbers, where the data lay, when a run was looked at.
NOT_A_SETTING = {
    "experiment.seed",
    "data.seed",
    "data.path",
    "experiment.checkpoint_every",
    "experiment.evaluate_every",
}
LISTED = {"methods": "method.name", "seeds": "experiment.seed"}  # what is listed by a name of its own
PATIENCE = 1.0  # seconds between two looks at a run that another process has in hand


@dataclass(frozen=True)
class Planned:
    """A run of a sweep and where it belongs."""

    config: Config
    path: Path

    @property
    def complete(self) -> bool:
        return RunFolder(self.path).complete

    @property
    def summary(self) -> dict[str, Any]:
        """What a complete run has come to."""
        summary: dict[str, Any] = RunFolder.open(self.path).read("result.json")
        return summary


class RunsFailedError(RunStoppedError):
    """Some runs of a sweep could not be completed, each for a reason of its own; all others are complete."""

    def __init__(self, reasons: Mapping[Path, str]):
        super().__init__("; ".join(f"{path}: {reason}" for path, reason in reasons.items()))
        self.reasons = reasons


class View(Protocol):
    """Somebody who follows a whole sweep."""

    def begin(self, run: Planned, at_once: int) -> Observer:
        """Who follows this run, which goes on now, with `at_once` runs side by side."""
        ...

    def wait(self, at_once: int) -> None:
        """All that is left is in other processes' hands."""
        ...


def expand(paths: Iterable[Path], overrides: Iterable[str] = ()) -> list[Config]:
    """The runs of sweep files, the first seed of all of them before the second of any: so a first answer comes soon.

    A sweep file is an ordinary configuration with a [sweep] section that says what varies:

    [sweep]
    methods = ["fedavg", "bcfl-g"]
    seeds = [0, 1, 2]
    vary = { "method.num_clusters" = [2, 3, 4] }   # every combination
    options = { bcfl-g = { fusion = "exact" } }    # of one method only, in place of those in [method]

    An override of what varies takes the place of the list: the sweep is narrowed to that value.
    """
    changed = dict(map(parse_override, overrides))
    found: list[tuple[int, Config]] = []
    for path in paths:
        values = read_toml(path)
        with _naming(path):
            found += _expand_one(values, changed)
    return [config for _, config in sorted(found, key=lambda pair: pair[0])]


@contextlib.contextmanager
def _naming(culprit: object) -> Iterator[None]:
    """What is wrong in here is told of that file or run: there are several."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{culprit}: {error}") from error


def _expand_one(values: dict[str, Any], changed: Mapping[str, Any]) -> Iterator[tuple[int, Config]]:
    """Every combination that a file's values ask for, with its seed's place in the list of seeds."""
    section = values.pop("sweep", {})
    vary = _what_varies(section)
    options_of = _options_of_methods(section.get("options", {}), vary.get("method.name", []))
    vary = {key: choices for key, choices in vary.items() if key not in changed}
    for combination in itertools.product(*vary.values()):
        own = copy.deepcopy(values)
        wanted = {**changed, **dict(zip(vary, combination, strict=True))}
        name = str(wanted.get("method.name"))
        options = options_of.get(name, {})
        for key, value in {**{f"method.{option}": value for option, value in options.items()}, **wanted}.items():
            set_value(own, key, value)
        config = parse_config(own)
        refuse_unknown(options, config.method, "key", f"sweep.options.{name}.")
        _check_names(config)
        yield vary.get("experiment.seed", [config.experiment.seed]).index(config.experiment.seed), config


def _what_varies(section: Any) -> dict[str, list[Any]]:
    """The values of every setting that the file's [sweep] section lists: section.key -> values."""
    if not isinstance(section, dict) or not isinstance(section.get("vary", {}), dict):
        raise ValueError("sweep must be a section, and so must sweep.vary")
    refuse_unknown(section, {"methods", "seeds", "vary", "options"}, "key", "sweep.")
    listed = {key: section[name] for name, key in LISTED.items() if name in section}
    vary = section.get("vary", {})
    if listed.keys() & vary.keys():
        raise ValueError("sweep lists methods or seeds, so sweep.vary must not do so again")
    for name in LISTED:
        if name in section and not _are_choices(section[name]):
            raise ValueError(f"sweep.{name} must be a list of at least one value, got {section[name]!r}")
    for key, choices in vary.items():
        if "." not in key or not _are_choices(choices):
            raise ValueError(f'sweep.vary: {key} must be "section.key" with a list of some values, got {choices!r}')
    return {**listed, **vary}


def _are_choices(choices: Any) -> bool:
    return isinstance(choices, list) and bool(choices)


def _options_of_methods(section: Any, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What [sweep.options] sets for single methods: method -> option -> value."""
    if not isinstance(section, dict) or not all(isinstance(options, dict) for options in section.values()):
        raise ValueError("sweep.options must hold a section for each method that has options of its own")
    refuse_unknown(section, map(str, methods), "method", "sweep.options.")
    return section


def _check_names(config: Config) -> None:
    """Nothing happens if the data set, the kind of partition and the model are known; no data are needed for that."""
    refuse_ignored(config.data)
    if config.data.factory is None:
        refuse_unknown([config.data.name], DATASETS, "data set")
        least = config.data.min_examples, config.data.min_test_examples
        parse_specification(config.data.partition, config.data.share_floor, least)
    if config.model.factory is None:
        model_factory(config)


def plan(configs: Iterable[Config], out: Path) -> list[Planned]:
    """A folder for every run, named for people and, by the settings' identity, for finding it again."""
    planned = {}
    for config in configs:
        name = f"{config.label}-{config.identity()}"
        planned[name] = Planned(config, out / name)
    return list(planned.values())


def without_results(runs: Iterable[Planned], folder: Path) -> list[Planned]:
    """The runs of which the folder holds no result: one file each, by the run's name, as collect.py keeps them."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} of results")
    return [run for run in runs if not (folder / f"{run.path.name}.json").is_file()]


def sweep(
    runs: Sequence[Planned],
    num_workers: int | None = None,
    view: View | None = None,
    jobs: int | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """The summaries of all runs; those that are complete are read, those that were stopped go on.

    Nothing runs twice, even if several sweeps share a folder: a run that another process has in hand is left to it,
    waited for at the end, and taken over should that process die. `jobs` runs go on side by side, each in a process
    with its share of `num_workers` threads (all cores if None). A run can keep at most as many cores busy as it has
    clients, so by default there are as many jobs as it takes to keep all of them busy: mostly one.
    A run that was made with other data than those at hand is refused. A run that fails is in no other's way: a
    RunsFailedError tells at the end which did, and why.
    """
    find_device(device)
    open_runs = [run for run in runs if not run.complete]
    set_up_memory(*(run.config for run in open_runs))
    fewest_clients = _check(runs, open_runs)
    cores = num_workers or os.cpu_count() or 1
    jobs = min(jobs or max(cores // fewest_clients, 1), max(len(open_runs), 1))
    workers = max(cores // jobs, 1) if num_workers or jobs > 1 else None
    how = {"num_workers": workers, "device": device, "way_on": "the same command"}
    with _helpers(open_runs, how, jobs - 1):
        failed = _work_off(open_runs, how, view, jobs)
    if failed:
        raise RunsFailedError(failed)
    return [run.summary for run in runs]


def _work_off(runs: Sequence[Planned], how: Mapping[str, Any], view: View | None, jobs: int) -> dict[Path, str]:
    """All runs are complete, whoever did them, but for those that failed: folder -> why."""
    waiting, failed = list(runs), dict[Path, str]()
    while waiting:
        taken: list[Planned] = []
        for run in waiting:
            at_once = max(jobs, 1 + sum(not other.complete for other in taken))
            try:
                if not run.complete and not _go_on(run, how, [view.begin(run, at_once)] if view else []):
                    taken.append(run)
            except Exception as error:  # a user's model may raise anything
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_IS_FULL:
                    raise  # it would be so for all that follow
                failed[run.path] = _in_one_line(error)
        waiting = [run for run in taken if not run.complete]
        if len(waiting) == len(taken) > 0:
            if view:
                view.wait(len(waiting))
            time.sleep(PATIENCE)
    return failed


def _in_one_line(error: Exception) -> str:
    """What went wrong; of a fault in somebody's code also where."""
    if isinstance(error, ValueError | RunStoppedError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"


def _go_on(run: Planned, how: Mapping[str, Any], observers: Sequence[Observer]) -> bool:
    """Whether the run is complete now; not if another process has it in hand."""
    try:
        if RunFolder(run.path).has("config.json"):
            resume(run.path, config=run.config, **how, observers=observers)
        else:
            start(run.config, run.path, **how, observers=observers)
    except TakenError:
        return False
    return True


@contextlib.contextmanager
def _helpers(runs: Sequence[Planned], how: Mapping[str, Any], count: int) -> Iterator[None]:
    """Other processes that work the runs off as well; locks keep everybody off each other's runs."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads in an unknown state
    # Each begins with another run: whoever finds one taken has loaded its data in vain.
    arguments = [([*runs[number:], *runs[:number]], how, os.getpid()) for number in range(1, count + 1)]
    helpers = [context.Process(target=_help, args=own, daemon=True) for own in arguments]
    try:
        for helper in helpers:
            helper.start()
        yield
    finally:
        for helper in helpers:
            helper.terminate()  # nothing is lost: a run goes on from its last checkpoint
            helper.join()


def _help(runs: Sequence[Planned], how: Mapping[str, Any], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this is told, and ends it
    set_up_memory(*(run.config for run in runs))
    for run in runs:
        if not run.complete:
            # What goes wrong here goes wrong again where the error can be shown: nobody else completes this run.
            with contextlib.suppress(Exception):
                _go_on(run, how, [_UntilAlone(parent)])


@dataclass(frozen=True)
class _UntilAlone:
    """The observer that ends its process once the one that started it is gone, killed perhaps."""

    parent: int

    def started(self, config: Config, data: Split, first_round: int) -> None:
        pass

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        if os.getppid() != self.parent:
            sys.exit()


def _check(runs: Sequence[Planned], open_runs: Sequence[Planned]) -> int:
    """The fewest clients of any open run, if every method suits its data and no run was made with other data.

    So a mistake in the last one shows before the first has run.
    """
    to_pose = set({_what_decides_soundness(run.config): run.path for run in reversed(open_runs)}.values())
    sharing_data: dict[Any, list[Planned]] = {}  # so that each is loaded once
    for run in runs:
        if run.path in to_pose or RunFolder(run.path).has("manifest.json"):
            sharing_data.setdefault(_what_decides_data(run.config), []).append(run)
    absent: set[DataConfig] = set()  # to look for them again, for every seed, may take long
    num_clients = []
    for group in sharing_data.values():
        posed = [run for run in group if run.path in to_pose]
        with _naming(f"run {(posed or group)[0].path.name}"):
            data = load_data(posed[0].config) if posed else _data_at_hand(group[0].config, absent)
        if data is None:
            continue
        for run in group:
            _refuse_other_data(run, data)
        for run in posed:
            with _naming(f"run {run.path.name}"):
                _try_model(run.config, data, pose(run.config, data, model_factory(run.config)).factory)
        if posed:
            num_clients.append(data.num_clients)
    return min(num_clients, default=1)


def _what_decides_soundness(config: Config) -> tuple[Any, ...]:
    """Of runs for which this is the same, all can be run or none."""
    own = json.dumps(config.method), config.model, config.training.batch_size
    who = config.experiment.clients_per_round, config.experiment.joins
    return *own, *who, _what_decides_data(config)


def _try_model(config: Config, data: FederatedData, factory: ModelFactory) -> None:
    """Nothing happens if the model can be trained on the data of the client that has least of them."""
    rows = min(data.train_of, key=len)
    x, images = local.pool(data.x_train[rows])
    examples = Examples(x, data.y_train[rows], torch.arange(len(rows)), images)
    probe = FlatModel(build(factory, config.experiment.seed, "probe"))
    local.check_model(probe, examples, data.num_classes, batch_size=config.training.batch_size)


def _what_decides_data(config: Config) -> tuple[Any, ...]:
    """Runs for which this is the same have the same data."""
    validation_seed = config.experiment.seed if config.data.validation else None
    return config.data, split_seed(config), validation_seed


def _data_at_hand(config: Config, absent: set[DataConfig]) -> FederatedData | None:
    """The configured data, or None where they are not on this machine: a complete run can be read without them."""
    if config.data in absent:
        return None
    try:
        return load_data(config)
    except (OSError, ValueError) as error:
        # A user's factory is absent where its module is, or a file that it reads.
        if not isinstance(error, OSError) and not isinstance(error.__cause__, ModuleNotFoundError | FileNotFoundError):
            raise
        absent.add(config.data)
        return None


def _refuse_other_data(run: Planned, data: FederatedData) -> None:
    """Nothing happens if the run, where it was begun, was begun with these data."""
    folder = RunFolder(run.path)
    if not folder.has("manifest.json"):
        return
    try:
        verify_manifest(data, folder.read("manifest.json"))
    except ValueError as error:
        raise ValueError(
            f"the run in {run.path} does not fit the data at hand: {error}; choose another folder with --out, or "
            f"delete {run.path} to run it again"
        ) from None


def differences(configs: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """For each run the settings, beside its method and seed, in which the runs differ: section.key -> value.

    Methods have options of their own: those are only compared between runs of one method.
    """
    flat = [
        {f"{section}.{name}": value for section, values in config.items() for name, value in values.items()}
        for config in configs
    ]
    seen: dict[tuple[str, str], list[str]] = {}
    everywhere = ""  # stands for any method
    for own in flat:
        for key, value in own.items():
            method = own["method.name"] if key.startswith("method.") else everywhere
            seen.setdefault((key, method), []).append(json.dumps(value))
    num_runs = Counter({everywhere: len(flat)}) + Counter(own["method.name"] for own in flat)
    # A setting that is off may not be written down at all: what only some runs have differs, too, and is told of those.
    differs = {pair for pair, values in seen.items() if len(set(values)) > 1 or len(values) < num_runs[pair[1]]}
    varied = {pair for pair in differs if pair[0] not in NOT_A_SETTING}
    return [
        {key: value for key, value in own.items() if {(key, own["method.name"]), (key, everywhere)} & varied}
        for own in flat
    ]


def title_of(key: str) -> str:
    """What a setting is called in a table: its own name, or its section's where the name alone would say nothing."""
    section, _, name = key.partition(".")
    return {"name": section, "factory": f"{section} factory"}.get(name, name)


def text_of(value: Any) -> str:
    """A setting's value in a table."""
    return value if isinstance(value, str) else json.dumps(value)


def rows_in_order(named: Sequence[tuple[str, Mapping[str, Any]]]) -> list[int]:
    """The order of a table's rows (method, settings): methods as they first appear, then by the settings' values.

    A setting that a row does not have comes first, then numbers by their size, then texts.
    """
    methods = list(dict.fromkeys(method for method, _ in named))
    varied = list(dict.fromkeys(key for _, settings in named for key in settings))

    def place(row: int) -> list[Any]:
        method, settings = named[row]
        values = [settings.get(key, -math.inf) for key in varied]
        return [methods.index(method), *((0, v) if isinstance(v, int | float) else (1, text_of(v)) for v in values)]

    return sorted(range(len(named)), key=place)


def draw_of(config: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """What tells apart runs that are averaged: who drew their numbers, and who their split.

    If that is the same, it is the same run, looked at or saved at other times.
    """
    seed, split = config["experiment"]["seed"], config["data"]["seed"]
    return seed, seed if split is None else split


def alike(summaries: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The summaries of each method and, under "settings", of what else varied, as a table has them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for summary in summaries:
        groups.setdefault((summary["method"], json.dumps(summary["settings"])), []).append(summary)
    found = list(groups.values())
    return [found[row] for row in rows_in_order([(first["method"], first["settings"]) for first, *_ in found])]


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Mean and sample standard deviation (0 for a single value); None where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0
