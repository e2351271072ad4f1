"""What a run is: five sections of settings, checked once at the border. Nothing else decides its results."""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from bcfl.client.trainer import Training
from bcfl.data.datasets import DATASETS, full_name
from bcfl.engines.simulator import Participation
from bcfl.methods import make_method, option_types

DEFAULT_METHOD = "bcfl-mh-3"
FROM_PYTHON = "given in Python"  # stands for a factory where a caller brought clients or a model of their own
# Settings younger than published runs, and what they are when off: then they are left out of what is written down, so
# that older runs keep their names and can be resumed.
YOUNGER: dict[tuple[str, str], Any] = {
    ("data", "drift_round"): None,
    ("data", "min_test_examples"): 1,
    ("experiment", "joins"): [],
    ("experiment", "mixture"): False,
    ("method", "stay"): None,
    ("method", "racing"): 0.0,
    ("method", "search"): "exact",
    ("method", "robust"): "none",
    ("method", "variant"): "personal",
}
WITH_OWN_DATA = {"factory", "seed", "validation", "drift_round", "drift_share"}  # what of [data] a factory leaves open
MODEL_FOR = {
    "digits": "mlp",
    "fashion_mnist": "fashion_cnn",
    "cifar10": "cifar_cnn",
    "amazon_review": "amazon_mlp",
    "digits_five": "digits_five_cnn",
}


@dataclass(frozen=True)
class DataConfig:
    """[data] which examples there are, and which client holds which."""

    name: str = "digits"
    path: str | None = None  # a folder or file with the data set, where it is not found by itself
    factory: str | None = None  # package.module:function that returns a list of clients, instead of a named set
    partition: str = "feature(4,5)"
    partition_file: str | None = None  # for partition = "file"
    clients_per_group: int | None = None  # for partition = "file": true group = client // clients_per_group
    seed: int | None = None  # of the partition; None: the run's seed
    share_floor: float = 0.0
    min_examples: int = 10  # of every client; a draw that gives one fewer is drawn again
    min_test_examples: int = 1
    rotations: tuple[int, ...] | None = None  # of digits
    domains: tuple[str, ...] | None = None  # of digits_five
    validation: float = 0.0  # test on this share of the clients' training data instead of the test data
    drift_round: int | None = None  # from this round on some clients hold the data of a client of another group
    drift_share: float = 0.25  # of the clients: so many change, in pairs that swap their data


@dataclass(frozen=True)
class ModelConfig:
    """[model] the network that every cluster has."""

    name: str = "auto"  # auto: what suits the data set
    factory: str | None = None  # package.module:function that returns a torch.nn.Module, instead of a named model


@dataclass(frozen=True)
class ExperimentConfig:
    """[experiment] how long, from which seed, who takes part, what is kept."""

    rounds: int = 30
    seed: int = 0
    evaluate_every: int = 1
    checkpoint_every: int = 1
    clients_per_round: float = 1.0
    dropout: float = 0.0
    straggling: float = 0.0
    joins: tuple[tuple[int, int], ...] = ()  # [[client, first round], …]: who is not there from the start
    mixture: bool = False  # evaluate each client's predictive mixture over the hypotheses beside its best model

    def participation(self) -> Participation:
        return Participation(self.clients_per_round, self.dropout, self.straggling, self.joins)


@dataclass(frozen=True)
class Config:
    """A run's settings as `parse_config` resolves them: every default is written out, so that it may change later."""

    data: DataConfig
    model: ModelConfig
    method: Mapping[str, Any]  # its name and all options that it has
    training: Training
    experiment: ExperimentConfig

    @property
    def label(self) -> str:
        """What a run folder is called for people."""
        data = full_name(self.data.name, self.data.domains) if self.data.factory is None else "own"
        data = "-".join(re.findall(r"[\w.]+", data))  # no brackets in a folder's name
        return f"{data}-{self.method['name']}-s{self.experiment.seed}"

    def with_data_path(self, path: str) -> "Config":
        """The same, with its data set at that place: nothing that decides results."""
        return dataclasses.replace(self, data=dataclasses.replace(self.data, path=path))

    def with_rounds(self, rounds: int) -> "Config":
        """The same for another number of rounds; those that both have are trained alike.

        They need not be evaluated alike: a run's last round always is, whatever evaluate_every says.
        """
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, rounds=rounds))

    def all_settings(self) -> dict[str, dict[str, Any]]:
        """Every setting as a plain value, ready for JSON."""
        plain: dict[str, dict[str, Any]] = json.loads(json.dumps(dataclasses.asdict(self)))  # tuples become lists
        return plain

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The settings as runs write them down: without the younger ones where these are off."""
        plain = self.all_settings()
        for (section, key), off in YOUNGER.items():
            if plain[section].get(key, off) == off:
                plain[section].pop(key, None)
        if "drift_round" not in plain["data"]:
            del plain["data"]["drift_share"]
        return plain

    def identity(self) -> str:
        """A short name of these settings: two runs with the same identity and the same data give the same results.

        What stands outside the settings is no part of it: of a partition file or a factory only the name counts, of
        data.path nothing. A sweep therefore compares a run's manifest with the data at hand before it takes its result.
        How often a run is evaluated and kept is a part, so a run that differs only in that has another identity.
        """
        values = self.as_dict()
        del values["data"]["path"]  # the same data may lie elsewhere on another machine
        text = json.dumps(values, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


SECTIONS: dict[str, Any] = {
    "data": DataConfig,
    "model": ModelConfig,
    "method": None,  # its keys are the methods' own options
    "training": Training,
    "experiment": ExperimentConfig,
}


def parse_config(values: Mapping[str, Any]) -> Config:
    """The configuration that nested plain values describe; an unknown key or a wrong type is named."""
    if not isinstance(values, Mapping):
        raise ValueError(f"settings must be sections of keys, got {values!r}")
    if "sweep" in values:
        raise ValueError("section sweep describes several runs: give the file to `bcfl sweep`")
    refuse_unknown(values, SECTIONS, "section")
    for name, section in values.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"{name} must be a section of settings, got {section!r}")
    sections = {
        name: parse_section(kind, values.get(name, {}), name) for name, kind in SECTIONS.items() if kind is not None
    }
    config = Config(method=_parse_method(values.get("method", {})), **sections)
    _check_ranges(config)
    return dataclasses.replace(config, data=_resolve_data(config.data), model=_resolve_model(config))


def load_config(path: Path | None, overrides: Iterable[str] = (), **experiment: Any) -> Config:
    """The configuration of a TOML file (or the default one), changed by `section.key=value` overrides."""
    values: dict[str, Any] = read_toml(path) if path else {}
    for override in overrides:
        apply_override(values, override)
    own = section_of(values, "experiment")
    own.update({key: value for key, value in experiment.items() if value is not None})
    config = parse_config(values)
    refuse_ignored(config.data)
    return config


def refuse_ignored(data: DataConfig) -> None:
    """Nothing happens unless a user's own clients come with settings of a named data set, which would be ignored.

    For what a user writes, not for what runs have written down: their defaults may have been others.
    """
    for field in dataclasses.fields(data) if data.factory is not None else ():
        if field.name not in WITH_OWN_DATA and getattr(data, field.name) != field.default:
            raise ValueError(
                f"data.{field.name} is for named data sets: leave it out, data.factory gives its clients as they are"
            )


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"configuration file {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"configuration file {path} is not valid TOML: {error}") from None


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in nested plain values."""
    set_value(values, *parse_override(override))


def parse_override(override: str) -> tuple[str, Any]:
    """The key and the value of `section.key=value`, read as TOML, and as plain text if it is not TOML."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"--set takes section.key=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return key.strip(), value


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in nested plain values."""
    section, _, name = key.partition(".")
    if not (section and name):
        raise ValueError(f"a setting is called section.key, got {key!r}")
    section_of(values, section)[name] = value


def section_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of nested plain values, there to be written into."""
    section = values.setdefault(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{name} must be a section of settings, got {section!r}")
    return section


def _parse_method(values: Mapping[str, Any]) -> dict[str, Any]:
    """The method's name and all of its options; options that only other methods have leave no trace."""
    hints = {"name": str, **option_types()}
    refuse_unknown(values, hints, "key", "method.")
    given = {key: check_type(value, hints[key], f"method.{key}") for key, value in values.items()}
    name = given.pop("name", DEFAULT_METHOD)
    method: Any = make_method(name, given)
    return {"name": name, **{key: value for key, value in dataclasses.asdict(method).items() if key in hints}}


def _resolve_data(data: DataConfig) -> DataConfig:
    """The data set's own options written out, in one way; a run that has other data is left as it is."""
    if data.factory is not None or data.name not in DATASETS:
        return data
    data = dataclasses.replace(data, partition="".join(data.partition.split()))  # feature(4, 5): runs differ in more
    defaults = {key: DATASETS[data.name].options.get(key) for key in ("rotations", "domains")}
    return dataclasses.replace(
        data, **{key: value for key, value in defaults.items() if value is not None and getattr(data, key) is None}
    )


def _resolve_model(config: Config) -> ModelConfig:
    """The model that "auto" stands for; where nothing does, the user will be asked for a name."""
    own = config.model.factory is not None or config.data.factory is not None
    if own or config.model.name != "auto":
        return config.model
    return dataclasses.replace(config.model, name=MODEL_FOR.get(config.data.name, "auto"))


def parse_section(kind: Any, values: Mapping[str, Any], section: str) -> Any:
    """The section's dataclass from plain values; an unknown key or a wrong type is named."""
    hints = get_type_hints(kind)
    refuse_unknown(values, hints, "key", f"{section}.")
    return kind(**{key: check_type(value, hints[key], f"{section}.{key}") for key, value in values.items()})


def check_type(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type that `hint` asks for; raises a ValueError that names `key` otherwise."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()  # plain numbers, as everything that is written down
    options = _options(hint)
    if type(None) in options and (value is None or value == "none"):  # also where any text will do
        return None
    for option in options:
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value):
            return float(value)
        if option in (int, str) and type(value) is option:
            return value
        if option is bool and isinstance(value, bool):
            return value
        if get_origin(option) is tuple and isinstance(value, list | tuple):
            kinds = get_args(option)
            length_fits = kinds[-1] is Ellipsis or len(kinds) == len(value)
            if length_fits:
                with contextlib.suppress(ValueError):  # which is about a part: the whole is told below
                    return tuple(check_type(part, kinds[0], key) for part in value)
    raise ValueError(f"{key} must be {in_words(hint)}, got {value!r}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def in_words(hint: Any) -> str:
    """What a setting of this type may be."""
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): '"none"'}
    described = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            described.append(" or ".join(f'"{choice}"' for choice in get_args(option)))
        elif get_origin(option) is tuple:
            described.append(f"a list of {_several(get_args(option))}")
        else:
            described.append(words[option])
    return " or ".join(described)


def _several(kinds: tuple[Any, ...]) -> str:
    """What a list holds that is of these types: `int, ...` or `int, int`."""
    kind, count = kinds[0], "" if kinds[-1] is Ellipsis else f"{len(kinds)} "
    words = {int: "whole numbers", float: "numbers", str: "texts"}
    return count + (words[kind] if kind in words else f"lists of {_several(get_args(kind))}")


def refuse_unknown(values: Iterable[str], allowed: Iterable[str], what: str, prefix: str = "") -> None:
    """Nothing happens if all values are allowed; otherwise a ValueError names the first that is not."""
    allowed = sorted(allowed)
    for key in values:
        if key not in allowed:
            near = [f"{prefix}{name}" for name in difflib.get_close_matches(key, allowed, 1)]
            meant = (settings_named(key) if prefix.removesuffix(".") in SECTIONS else []) or near
            hint = f"did you mean {' or '.join(meant)}? " if meant else ""
            raise ValueError(f"unknown {what} {prefix}{key}; {hint}allowed: {', '.join(allowed)}")


def settings_named(key: str) -> list[str]:
    """The settings of that name, whichever section they are in: section.key."""
    known = {section: option_types() if kind is None else get_type_hints(kind) for section, kind in SECTIONS.items()}
    return [f"{section}.{key}" for section, keys in known.items() if key in keys]


def _check_ranges(config: Config) -> None:
    training, experiment, data = config.training, config.experiment, config.data
    rules = {
        "training.learning_rate": (training.learning_rate > 0, "> 0"),
        "training.momentum": (0 <= training.momentum < 1, "in [0, 1)"),
        "training.batch_size": (training.batch_size >= 1, "≥ 1"),
        "training.local_steps": (training.local_steps >= 1, "≥ 1"),
        "training.fisher_examples": (training.fisher_examples >= 1, "≥ 1"),
        "experiment.rounds": (experiment.rounds >= 1, "≥ 1"),
        "experiment.seed": (experiment.seed >= 0, "≥ 0"),
        "experiment.evaluate_every": (experiment.evaluate_every >= 1, "≥ 1"),
        "experiment.checkpoint_every": (experiment.checkpoint_every >= 1, "≥ 1"),
        "experiment.clients_per_round": (
            0 < experiment.clients_per_round <= 1
            or (experiment.clients_per_round > 1 and experiment.clients_per_round.is_integer()),
            "a share in (0, 1] or a whole number of clients",
        ),
        "experiment.dropout": (0 <= experiment.dropout < 1, "in [0, 1)"),
        "experiment.straggling": (0 <= experiment.straggling < 1, "in [0, 1)"),
        "experiment.joins": (
            all(client >= 0 and first_round >= 1 for client, first_round in experiment.joins)
            and len(dict(experiment.joins)) == len(experiment.joins),
            "a list of [client, first round ≥ 1], every client once",
        ),
        "data.share_floor": (0 <= data.share_floor < 1, "in [0, 1)"),
        "data.min_examples": (data.min_examples >= 1, "≥ 1"),
        "data.min_test_examples": (data.min_test_examples >= 0, "≥ 0"),
        "data.validation": (0 <= data.validation < 1, "in [0, 1)"),
        "data.drift_round": (
            data.drift_round is None or 2 <= data.drift_round <= experiment.rounds,
            f"from 2 to experiment.rounds = {experiment.rounds}",
        ),
        "data.drift_share": (data.drift_round is None or 0 < data.drift_share <= 1, "in (0, 1]"),
    }
    at_least = {"num_clusters": 1, "evidence_points": 1, "scoring_examples": 1, "selection": 1, "warm_up_rounds": 0}
    at_least |= {"prior_precision": 0, "proximal": 0, "max_stories": 1, "caution": 0, "search_rounds": 0}
    for name in at_least.keys() & config.method.keys():
        value = config.method[name]
        rules[f"method.{name}"] = (value is None or value >= at_least[name], f"≥ {at_least[name]}")
    if "forgetting" in config.method:
        rules["method.forgetting"] = (0 <= config.method["forgetting"] <= 1, "in [0, 1]")
    if isinstance(config.method.get("stay"), float):
        rules["method.stay"] = (0 < config.method["stay"] < 1, 'in (0, 1), or "learn"')
    if "min_weight" in config.method:
        rules["method.min_weight"] = (0 <= config.method["min_weight"] < 1, "in [0, 1)")
    if config.method.get("racing"):
        rules["method.racing"] = (
            0 < config.method["racing"] < 1
            and config.method["evidence_points"] == 1
            and config.method["cluster_size"] is None
            and config.method["stay"] is None,  # memory needs how likely every cluster is, not only the likely ones
            "0 (off), or in (0, 1) with evidence_points = 1 and without cluster_size or stay",
        )
    if config.method.get("search") == "one_change":
        rules["method.search"] = (
            not config.method["racing"] and config.method["cluster_size"] is None,
            '"exact" where there is racing or cluster_size',
        )
    if "held_out" in config.method:
        rules["method.held_out"] = (0 < config.method["held_out"] < 1, "in (0, 1)")
    if "give_up_weight" in config.method:
        rules["method.give_up_weight"] = (0 < config.method["give_up_weight"] <= 1, "in (0, 1]")
    above_zero = {"sigma", "alpha", "smoothing", "temperature", "concentration", "effective_examples"}
    for name in above_zero & config.method.keys():
        value = config.method[name]
        rules[f"method.{name}"] = (value is None or isinstance(value, str) or value > 0, "> 0")
    if config.method.get("evidence_kind") == "sigma" and config.method["evidence_points"] > 1:
        rules["method.evidence_points"] = (config.method["evidence_points"] % 2 == 0, '1 or even for "sigma" points')
    if config.method.get("cluster_size") is not None:
        fewest, most = config.method["cluster_size"]
        rules["method.cluster_size"] = (0 <= fewest <= most, "[fewest, most] with 0 ≤ fewest ≤ most")
    values = config.as_dict()
    for key, (holds, allowed) in rules.items():
        if not holds:
            section, name = key.split(".")
            raise ValueError(f"{key} must be {allowed}, got {values[section][name]}")
