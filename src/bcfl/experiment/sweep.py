"""Many runs, none of them twice: each has a folder named by its settings, so what is done is found again."""

import copy
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcfl.data.partition import FederatedData
from bcfl.engines.stacked import find_device
from bcfl.experiment.config import Config, apply_override, parse_config, read_toml, set_value
from bcfl.experiment.problem import load_data, model_factory, pose
from bcfl.experiment.run import Observer, resume, start
from bcfl.experiment.store import RunFolder


@dataclass(frozen=True)
class Planned:
    """A run of a sweep and where it belongs."""

    config: Config
    path: Path

    @property
    def complete(self) -> bool:
        return RunFolder(self.path).complete


def expand(path: Path, overrides: Iterable[str] = ()) -> list[Config]:
    """The runs of a sweep file: an ordinary configuration with a [sweep] section that says what varies.

    [sweep]
    methods = ["fedavg", "bcfl-g"]
    seeds = [0, 1, 2]
    vary = { "method.num_clusters" = [2, 3, 4] }   # every combination
    """
    values = read_toml(path)
    section = values.pop("sweep", {})
    if not isinstance(section, dict) or not isinstance(section.get("vary", {}), dict):
        raise ValueError(f"sweep in {path} must be a section, and so must sweep.vary")
    unknown = sorted(set(section) - {"methods", "seeds", "vary"})
    if unknown:
        raise ValueError(f"unknown key sweep.{unknown[0]} in {path}, allowed: methods, seeds, vary")
    vary = {"method.name": section.get("methods"), **section.get("vary", {}), "experiment.seed": section.get("seeds")}
    vary = {key: choices for key, choices in vary.items() if choices is not None}
    for key, choices in vary.items():
        if not isinstance(choices, list) or not choices or "." not in key:
            raise ValueError(f"sweep in {path}: {key} must be section.key with a list of at least one value")
    configs = []
    for combination in itertools.product(*vary.values()):
        own = copy.deepcopy(values)
        for override in overrides:
            apply_override(own, override)
        for key, value in zip(vary, combination, strict=True):
            set_value(own, key, value)
        configs.append(parse_config(own))
    return configs


def plan(configs: Iterable[Config], out: Path) -> list[Planned]:
    """A folder for every run, named for people and, by the settings' identity, for finding it again."""
    planned = {}
    for config in configs:
        name = f"{config.label}-{config.identity()}"
        planned[name] = Planned(config, out / name)
    return list(planned.values())


def sweep(
    runs: Sequence[Planned],
    num_workers: int | None = None,
    observers_for: Callable[[int, Planned], Sequence[Observer]] = lambda position, run: (),
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """The summaries of all runs; those that are complete are read, those that were stopped go on.

    One run at a time: each of them uses all cores by itself.
    """
    find_device(device)
    _check([run.config for run in runs if not run.complete])
    summaries = []
    for position, run in enumerate(runs):
        if not run.complete:
            how: dict[str, Any] = {"num_workers": num_workers, "device": device}
            own = {**how, "observers": observers_for(position, run)}
            if RunFolder(run.path).has("config.json"):
                resume(run.path, **own)
            else:
                start(run.config, run.path, **own)
        summaries.append(RunFolder.open(run.path).read("result.json"))
    return summaries


def _check(configs: Sequence[Config]) -> None:
    """Nothing happens if every method suits its data: a mistake in the last one shows before the first has run."""
    one_of_each = {(repr(config.data), json.dumps(config.method)): config for config in reversed(configs)}
    loaded: tuple[tuple[Any, ...], FederatedData] | None = None
    for _, config in sorted(one_of_each.items(), key=lambda item: item[0]):  # by data: each is loaded once
        key = (config.data, config.experiment.seed)
        if loaded is None or loaded[0] != key:
            loaded = key, load_data(config)
        pose(config, loaded[1], model_factory(config))


def by_method(summaries: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The summaries of each method, in the order in which the methods first appear."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    return groups


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Mean and sample standard deviation (0 for a single value); None where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0
