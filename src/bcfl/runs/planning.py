"""Which runs experiment files describe, and the folder that each of them has."""

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcfl.data.datasets import DATASETS
from bcfl.data.partition import parse_specification
from bcfl.runs.problem import model_factory
from bcfl.runs.settings import (
    Config,
    load_named_plugin,
    parse_config,
    parse_override,
    read_toml,
    refuse_foreign,
    refuse_ignored,
    refuse_unknown,
    set_value,
)
from bcfl.runs.store import RunFolder

LISTED = {"methods": "method.name", "seeds": "experiment.seed"}  # what is listed by a name of its own


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
        with naming(path):
            found += _expand_one(values, changed)
    refuse_foreign(_options_in(changed), [config.method["name"] for _, config in found])
    return [config for _, config in sorted(found, key=lambda pair: pair[0])]


@contextlib.contextmanager
def naming(culprit: object) -> Iterator[None]:
    """What is wrong in here is told of that file or run: there are several."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{culprit}: {error}") from error


def _options_in(keys: Iterable[str]) -> list[str]:
    """The options of methods among section.key."""
    return [key.removeprefix("method.") for key in keys if key.startswith("method.")]


def _expand_one(values: dict[str, Any], changed: Mapping[str, Any]) -> Iterator[tuple[int, Config]]:
    """Every combination that a file's values ask for, with its seed's place in the list of seeds."""
    section = values.pop("sweep", {})
    vary = _what_varies(section)
    options_of = _options_of_methods(section.get("options", {}), vary.get("method.name", []))
    vary = {key: choices for key, choices in vary.items() if key not in changed}
    names = []
    for combination in itertools.product(*vary.values()):
        own = copy.deepcopy(values)
        wanted = {**changed, **dict(zip(vary, combination, strict=True))}
        name = str(wanted.get("method.name"))
        options = options_of.get(name, {})
        for key, value in {**{f"method.{option}": value for option, value in options.items()}, **wanted}.items():
            set_value(own, key, value)
        load_named_plugin(own)
        config = parse_config(own)
        names.append(config.method["name"])
        refuse_unknown(options, config.method, "key", f"sweep.options.{name}.")
        _check_names(config)
        yield vary.get("experiment.seed", [config.experiment.seed]).index(config.experiment.seed), config
    refuse_foreign([*values.get("method", {}), *_options_in(vary)], names)  # several methods may share a file


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
        if not DATASETS[config.data.name].has_sites:
            least = config.data.min_examples, config.data.min_test_examples
            parse_specification(config.data.partition, config.data.share_floor, least)
    if config.model.factory is None:
        model_factory(config, (1, 1))


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
