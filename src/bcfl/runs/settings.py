"""What a run is: five sections of settings, checked once at the border. Nothing else decides its results."""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcfl.client.trainer import Training
from bcfl.data.datasets import DATASETS, SITES, full_name
from bcfl.likelihood import AUTO
from bcfl.methods import NEAR, all_options, entry_of, is_known, load_plugin, make_method, owners_of
from bcfl.runs.fields import Setting, named, settings_in, shown
from bcfl.runs.sections import SECTIONS, DataConfig, ExperimentConfig, ModelConfig

DEFAULT_METHOD = "bcfl-mh-3"
# Of [data] what only tables have: which column is what, and how rows are prepared.
OF_TABLES = ("site", "target", "test", "categories", "drop", "person", "weight", "offset", "exposure", "rare", "rows")
CUTTING = ("partition_file", "clients_per_group", "share_floor", "min_examples", "min_test_examples")
# Settings younger than published runs, and what they are when off: then they are left out of what is written down, so
# that older runs keep their names and can be resumed.
YOUNGER_TRAINING = {
    key: getattr(Training, key)
    for key in ("optimizer", "weight_decay", "clip", "schedule", "decay", "local", "local_epochs")
}
YOUNGER: dict[tuple[str, str], Any] = {
    **{("data", key): None for key in OF_TABLES},
    ("data", "drift_round"): None,
    ("data", "likelihood"): AUTO,
    ("data", "min_test_examples"): 1,
    ("experiment", "joins"): [],
    ("experiment", "together"): None,
    ("experiment", "evaluate"): "all",
    ("experiment", "mixture"): False,
    **{("training", key): off for key, off in YOUNGER_TRAINING.items()},
    ("method", "hypotheses"): "all",
    ("method", "evidence_precision"): 0.0,
    ("method", "stay"): None,
    ("method", "racing"): 0.0,
    ("method", "search"): "exact",
    ("method", "robust"): "none",
    ("method", "variant"): "personal",
}
# Of the younger ones, those that are not off by default.
NOT_AS_BEFORE = [("experiment", "together"), ("method", "hypotheses")]
EVIDENCE_PRECISION = (
    1000.0  # what was added to beliefs whose evidence was taken at several points, before it was a setting
)
# What of [data] a factory leaves open.
WITH_OWN_DATA = {"factory", "likelihood", "seed", "validation", "drift_round", "drift_share"}
_EPOCHS = "did you mean training.local_epochs, with training.local = epochs?"
NOT_OFFERED = {  # what others call by these names, and what there is instead
    "loss": "training minimises −log p(y | x), which the likelihood of y says: data.likelihood",
    "epochs": _EPOCHS,
    "lr": "did you mean training.learning_rate?",
}


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
        if data == "table" and self.data.path is not None:
            data = Path(self.data.path).stem
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
            if section == "method" and not entry_of(self.method["name"]).comes_along:
                continue  # another's option of that name has another default
            told = key == "evidence_precision" and plain["method"].get("evidence_points") != 1  # it was another before
            if plain[section].get(key, off) == off and not told:
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


def parse_config(values: Mapping[str, Any]) -> Config:
    """The configuration that nested plain values describe; an unknown key or a wrong type is named."""
    try:
        return _parsed(values)
    except RecursionError:
        raise ValueError("settings must be sections of keys, these are nested too deeply") from None


def kept_config(values: Mapping[str, Any]) -> Config:
    """The configuration that a run has written down."""
    return parse_config(as_kept(values))


def as_kept(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a run has written down, with what it was before a setting came whose default is another."""
    kept = dict(values) if isinstance(values, Mapping) else {}
    for section, key in NOT_AS_BEFORE:
        if isinstance(part := kept.get(section), Mapping) and (section != "method" or _is_option(key, part)):
            kept[section] = {key: YOUNGER[section, key], **part}
    method = kept.get("method")
    if isinstance(method, Mapping) and method.get("evidence_points", 1) != 1:
        kept["method"] = {"evidence_precision": EVIDENCE_PRECISION, **method}
    return kept or values


def _is_option(key: str, method: Mapping[str, Any]) -> bool:
    """Whether the method of a section has that option; of one that is not installed here nobody knows."""
    name = method.get("name", DEFAULT_METHOD)
    return isinstance(name, str) and is_known(name) and key in entry_of(name).options


def _parsed(values: Mapping[str, Any]) -> Config:
    if not isinstance(values, Mapping):
        raise ValueError(f"settings must be sections of keys, got {shown(values)}")
    if "sweep" in values:
        raise ValueError("section sweep describes several runs: give the file to `bcfl sweep`")
    refuse_unknown(values, SECTIONS, "section")
    for name, section in values.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"{named(name)} must be a section of settings, got {shown(section)}")
    sections = {
        name: parse_section(kind, values.get(name, {}), name) for name, kind in SECTIONS.items() if kind is not None
    }
    config = Config(method=_parse_method(values.get("method", {})), **sections)
    drift, rounds = config.data.drift_round, config.experiment.rounds
    if drift is not None and drift > rounds:
        raise ValueError(f"data.drift_round must be from 2 to experiment.rounds = {rounds}, got {drift}")
    return dataclasses.replace(config, data=_resolve_data(config.data), model=_resolve_model(config))


def load_config(
    path: Path | None, overrides: Iterable[str] = (), *, compared: Sequence[str] = (), **experiment: Any
) -> Config:
    """The configuration of a TOML file (or the default one), changed by `section.key=value` overrides.

    What it would ignore is refused; where several methods are `compared`, only what all of them would.
    """
    values: dict[str, Any] = read_toml(path) if path else {}
    for override in overrides:
        apply_override(values, override)
    section_of(values, "experiment").update({key: value for key, value in experiment.items() if value is not None})
    return written_config(values, compared)


def written_config(values: Mapping[str, Any], compared: Sequence[str] = ()) -> Config:
    """The configuration as a user writes it: nothing of it is ignored, and a plugin that it names is loaded."""
    load_named_plugin(values)
    config = parse_config(values)
    refuse_ignored(config.data)
    if config.training.local != "epochs" and config.training.local_epochs != Training.local_epochs:
        raise ValueError("training.local_epochs is for training.local = epochs: give that, too, or leave it out")
    refuse_foreign(values.get("method", {}), compared or [config.method["name"]])
    return config


def load_named_plugin(values: Mapping[str, Any]) -> None:
    """The methods of the module in method.plugin, if there is one, are known from here on: its code is run."""
    method = values.get("method") if isinstance(values, Mapping) else None
    if isinstance(method, Mapping) and isinstance(plugin := method.get("plugin"), str) and plugin != "none":
        load_plugin(plugin)


def refuse_ignored(data: DataConfig) -> None:
    """Nothing happens unless a setting would be ignored: of a named data set, say, beside a user's own clients.

    For what a user writes, not for what runs have written down: their defaults may have been others.
    """
    for field in dataclasses.fields(data) if data.factory is not None else ():
        if field.name not in WITH_OWN_DATA and getattr(data, field.name) != field.default:
            raise ValueError(
                f"data.{field.name} is for named data sets: leave it out, data.factory gives its clients as they are"
            )
    if data.factory is None and data.name in DATASETS:
        _refuse_other_sets(data)
    needs = {
        "partition_file": "partition = file",
        "clients_per_group": "partition = file",
        "drift_share": "drift_round",
    }
    has = {"partition = file": data.partition == "file", "drift_round": data.drift_round is not None}
    for name, needed in needs.items():
        if not has[needed] and getattr(data, name) != getattr(DataConfig, name):
            raise ValueError(f"data.{name} is for data.{needed}: give that, too, or leave it out")


def _refuse_other_sets(data: DataConfig) -> None:
    """Nothing happens unless a setting is for tables and the data set is none, or the other way round."""
    entry = DATASETS[data.name]
    for key in OF_TABLES:
        if key not in entry.options and getattr(data, key) is not None:
            names = " or ".join(name for name, one in DATASETS.items() if key in one.options)
            raise ValueError(f"data.{key} is for data.name = {names}, not for {data.name}: leave it out")
    if entry.has_sites and (
        data.partition != SITES or any(getattr(data, k) != getattr(DataConfig, k) for k in CUTTING)
    ):
        raise ValueError(f"data set {data.name!r} is divided into its sites as it is: leave data.partition and what "
                         "belongs to it out")  # fmt: skip


def refuse_foreign(options: Iterable[str], names: Sequence[str]) -> None:
    """Nothing happens if each option is one that some of the named methods has: others would be ignored."""
    entries = [entry_of(name) for name in names]
    for option in options:
        if option in ("name", "plugin") or any(option in entry.options for entry in entries):
            continue
        owners = ", ".join(entry.name for entry in owners_of(option))
        theirs = ", ".join(dict.fromkeys(option for entry in entries for option in entry.options)) or "none"
        raise ValueError(f"method.{option} is an option of {owners}, not of {', '.join(dict.fromkeys(names))}: "
                         f"leave it out (options here: {theirs})")  # fmt: skip


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"configuration file {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"configuration file {path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # of TOML, of UTF-8, or of a number of thousands of digits
        raise ValueError(f"configuration file {path} is not valid TOML: {error}") from None


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in nested plain values."""
    set_value(values, *parse_override(override))


def parse_override(override: str) -> tuple[str, Any]:
    """The key and the value of `section.key=value`, read as TOML, and as plain text if it is not TOML."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"--set takes section.key=value, got {shown(override)}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    return key.strip(), value


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in nested plain values."""
    section, _, name = key.partition(".")
    if not (section and name):
        meant = " or ".join(settings_named(key))
        hint = f"; did you mean {meant}?" if meant else ""
        raise ValueError(f"a setting is called section.key, got {shown(key)}{hint}")
    section_of(values, section)[name] = value


def section_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of nested plain values, there to be written into."""
    section = values.setdefault(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{named(name)} must be a section of settings, got {shown(section)}")
    return section


def _parse_method(values: Mapping[str, Any]) -> dict[str, Any]:
    """The method's name and all of its options; options that only other methods have leave no trace."""
    given = dict(values)
    name = Setting(str).check(given.pop("name", DEFAULT_METHOD), "method.name")
    plugin = Setting(str | None).check(given.pop("plugin", None), "method.plugin")
    entry = entry_of(name)
    refuse_unknown(given, all_options(), "key", "method.")
    for key, value in given.items():
        given[key] = _option(entry.build if key in entry.options else None, key, value)
    try:
        method = make_method(name, given)
    except ValueError as error:  # options that do not go together
        raise ValueError(f"method.{error}") from None
    brought_by = {} if plugin is None or entry.comes_along else {"plugin": plugin}
    return {"name": name, **brought_by, **{key: getattr(method, key) for key in entry.options}}


def _option(kind: type | None, key: str, value: Any) -> Any:
    """The value of a method's option, or of one that only other methods have: as any of them would take it."""
    kinds = [kind] if kind else [entry.build for entry in owners_of(key)]
    for other in kinds[1:]:
        with contextlib.suppress(ValueError):
            return settings_in(other)[key].check(value, f"method.{key}")
    return settings_in(kinds[0])[key].check(value, f"method.{key}")


def _resolve_data(data: DataConfig) -> DataConfig:
    """The data set's own options written out, in one way; a run that has other data is left as it is."""
    if data.factory is not None or data.name not in DATASETS:
        return data
    data = dataclasses.replace(data, partition="".join(data.partition.split()))  # feature(4, 5): runs differ in more
    entry = DATASETS[data.name]
    if entry.has_sites and data.partition == DataConfig.partition:
        data = dataclasses.replace(data, partition=SITES)
    defaults = {key: entry.options.get(key) for key in ("rotations", "domains", *OF_TABLES)}
    return dataclasses.replace(
        data, **{key: value for key, value in defaults.items() if value is not None and getattr(data, key) is None}
    )


def _resolve_model(config: Config) -> ModelConfig:
    """The model that "auto" stands for; where nothing does, the user will be asked for a name."""
    given = config.model.factory is not None or config.data.factory is not None
    if given or config.model.name != "auto" or config.data.name not in DATASETS:
        return config.model
    return dataclasses.replace(config.model, name=DATASETS[config.data.name].model)


def parse_section(kind: Any, values: Mapping[str, Any], section: str) -> Any:
    """The section's dataclass from plain values; an unknown key or a wrong type is named."""
    known = settings_in(kind)
    refuse_unknown(values, known, "key", f"{section}.")
    return kind(**{key: known[key].check(value, f"{section}.{key}") for key, value in values.items()})


def refuse_unknown(values: Iterable[str], allowed: Iterable[str], what: str, prefix: str = "") -> None:
    """Nothing happens if all values are allowed; otherwise a ValueError names the first that is not."""
    allowed = sorted(allowed)
    for key in values:
        if key not in allowed:
            near = [f"{prefix}{name}" for name in difflib.get_close_matches(str(key), allowed, 1, NEAR)]
            meant = (settings_named(key) if prefix.removesuffix(".") in SECTIONS else []) or near
            hint = f"did you mean {' or '.join(meant)}? " if meant else ""
            hint = f"{NOT_OFFERED[key]}; " if key in NOT_OFFERED else hint
            raise ValueError(f"unknown {what} {prefix}{named(key)}; {hint}allowed: {', '.join(allowed)}")


def settings_named(key: str) -> list[str]:
    """The settings of that name, whichever section they are in: section.key."""
    known = {section: all_options() if kind is None else settings_in(kind) for section, kind in SECTIONS.items()}
    return [f"{section}.{key}" for section, keys in known.items() if key in keys]
