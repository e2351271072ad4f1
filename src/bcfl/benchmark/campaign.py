"""Many contestants on many tasks: planned, worked off side by side, gone on with after a stop."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from bcfl.benchmark.contestants import CONTESTANTS, Contestant, contestants_named
from bcfl.benchmark.fitting import MODELS, Setting, record
from bcfl.benchmark.ledger import Key, keep, kept
from bcfl.benchmark.preparation import Federation, federation
from bcfl.benchmark.splits import NUM_DRAWS
from bcfl.benchmark.tasks import Task, all_tasks


@dataclass(frozen=True)
class Campaign:
    """Which contestants meet on which tasks, with which models, draws and work; whether options are chosen, and
    whether whole sites are kept out and judged."""

    tasks: Sequence[Task]
    contestants: Sequence[Contestant]
    models: Sequence[str] = tuple(MODELS)
    draws: Sequence[int] = (0,)
    tune: bool = False
    newcomers: bool = False
    setting: Setting = field(default_factory=Setting)

    def __post_init__(self) -> None:
        for model in self.models:
            if model not in MODELS:
                raise ValueError(f"--models: unknown model {model!r}, known: {', '.join(MODELS)}")
        for draw in self.draws:
            if not 0 <= draw < NUM_DRAWS:
                raise ValueError(f"--draws must be from 0 to {NUM_DRAWS - 1}, got {draw}")

    def entries(self) -> list[Key]:
        """All that is to be done, task by task."""
        return [
            (task.name, one.name, model, draw, self.tune, self.newcomers)
            for task in self.tasks
            for draw in self.draws
            for one in self.contestants
            for model in self.models
            if one.takes(task, model) and (one.serves_newcomers or not self.newcomers)
        ]


def quick() -> Campaign:
    """A minute's worth: three small tasks, a few contestants, a linear model, little work."""
    tasks = [all_tasks()[name] for name in ("sleepstudy", "contraception", "planted-answers")]
    names = [name for name in ("local", "pooled", "mixed-model", "fedavg", "bcfl-g", "bcfl") if name in CONTESTANTS]
    return Campaign(tasks, contestants_named(",".join(names)), ("linear",), setting=Setting(rounds=8))


def work_off(
    campaign: Campaign, folder: Path, jobs: int, tell: Callable[[str], None] = lambda line: None
) -> dict[Key, str]:
    """All of the campaign that the folder does not hold yet is done; what failed and why is returned, the rest kept."""
    done = kept(folder)
    entries = [key for key in campaign.entries() if key not in done]
    tell(f"{len(campaign.entries()) - len(entries)} of {len(campaign.entries())} are there already")
    failed: dict[Key, str] = {}
    for number, (key, made) in enumerate(_made(entries, campaign.setting, jobs), 1):
        if isinstance(made, str):
            failed[key] = made
        else:
            keep(folder, made)
        told = made if isinstance(made, str) else f"{made['seconds'] + made['choosing_seconds']:.1f} s"
        tell(f"{number}/{len(entries)} {key[0]} {key[1]} {key[2]} draw {key[3]}: {told}")
    return failed


def _made(entries: Sequence[Key], setting: Setting, jobs: int) -> Iterator[tuple[Key, dict[str, Any] | str]]:
    """Each entry's record, or why there is none, in the order in which they become ready."""
    if jobs == 1:
        for key in entries:
            yield key, _done(key, setting)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        waiting = {pool.submit(_done, key, setting): key for key in entries}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _done(key: Key, setting: Setting) -> dict[str, Any] | str:
    task, contestant, model, draw, tune, newcomers = key
    try:
        found = contestants_named(contestant)[0]
        return record(found, model, _federation(task, draw), setting, tune=tune, newcomers=newcomers)
    except Exception as error:  # one that fails is in no other's way
        return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=2)
def _federation(task: str, draw: int) -> Federation:
    return federation(all_tasks()[task], draw)
