"""Many runs, none of them twice: each has a folder named by its settings, so what is done is found again."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bcfl.client.check import check_model
from bcfl.client.examples import Examples, pool
from bcfl.data.manifest import verify_manifest
from bcfl.data.partition import FederatedData
from bcfl.engines.crew import find_device
from bcfl.model.flat import FlatModel, ModelFactory, build
from bcfl.runs.loop import resume, start
from bcfl.runs.observers import Observer
from bcfl.runs.planning import Planned, naming
from bcfl.runs.problem import load_data, model_factory, pose, set_up_memory, sizes_of, split_seed
from bcfl.runs.sections import DataConfig
from bcfl.runs.settings import Config
from bcfl.runs.stopping import DISK_IS_FULL, RunStoppedError
from bcfl.runs.store import RunFolder, TakenError

PATIENCE = 1.0  # seconds between two looks at a run that another process has in hand


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
class _UntilAlone(Observer):
    """The observer that ends its process once the one that started it is gone, killed perhaps."""

    parent: int

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
        with naming(f"run {(posed or group)[0].path.name}"):
            data = load_data(posed[0].config) if posed else _data_at_hand(group[0].config, absent)
        if data is None:
            continue
        for run in group:
            _refuse_other_data(run, data)
        for run in posed:
            with naming(f"run {run.path.name}"):
                _try_model(run.config, data, pose(run.config, data, model_factory(run.config, sizes_of(data))).factory)
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
    x, images = pool(data.x_train[rows])
    examples = Examples(x, data.y_train[rows], torch.arange(len(rows)), images)
    probe = FlatModel(build(factory, config.experiment.seed, "probe"))
    check_model(probe, examples, data.num_classes, batch_size=config.training.batch_size)


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
