"""From a configuration file and a number of clients to the settings of a deployed federation."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bcfl.data.datasets import DATASETS
from bcfl.data.partition import parse_specification
from bcfl.engines.flower import Terms
from bcfl.runs.problem import method_for, users_function
from bcfl.runs.sections import DataConfig
from bcfl.runs.settings import (
    Config,
    apply_override,
    load_named_plugin,
    parse_config,
    parse_section,
    read_toml,
    refuse_foreign,
    refuse_ignored,
    section_of,
    set_value,
)

ROTATIONS = (0, 90, 180, 270)
DEFAULT_CLIENTS = 4


def read_settings(
    path: Path | None,
    overrides: Iterable[str],
    num_clients: int | None,
    seed: int | None = None,
    data_factory: str | None = None,
) -> tuple[Config, dict[str, Any]]:
    """The run's configuration and the federation's terms; what is left open suits the number of clients.

    How many clients there are is said by `num_clients`, by deploy.num_clients, or by both alike.
    """
    values: dict[str, Any] = read_toml(path) if path else {}
    for override in overrides:
        apply_override(values, override)
    if seed is not None:
        set_value(values, "experiment.seed", seed)
    own_terms, data, options = (section_of(values, name) for name in ("deploy", "data", "method"))
    options = {**options}  # as given: what suits the number of clients may come to them
    del values["deploy"]
    if data_factory is not None and not {"name", "factory"} & section_of(values, "model").keys():
        raise ValueError("--data-factory: model.name or model.factory must be given for these data")
    terms = _terms(own_terms, num_clients)
    if not {"name", "partition", "factory"} & data.keys():
        _suit(values, terms.num_clients)
    load_named_plugin(values)
    config = parse_config(values)
    refuse_ignored(config.data)
    for key, reference in _factories(config, data_factory).items():
        if not re.fullmatch(r"\w+(\.\w+)*:\w+", reference):
            raise ValueError(f"{key} must be package.module:function, got {reference!r}")
        if _is_here(reference):
            users_function(reference, key)  # a ValueError if its module is here and has no such function
    refuse_foreign(options, [config.method["name"]])
    if config.data.factory is None:
        _check_partition(config.data, terms.num_clients)
    method_for(config, terms.num_clients)
    return config, asdict(terms)


def found_elsewhere(config: Config, data_factory: str | None = None) -> dict[str, str]:
    """The functions by the settings that name them, as far as this machine does not have their modules."""
    return {key: name for key, name in _factories(config, data_factory).items() if not _is_here(name)}


def _factories(config: Config, data_factory: str | None) -> dict[str, str]:
    named = {"model.factory": config.model.factory, "data.factory": config.data.factory, "--data-factory": data_factory}
    return {key: reference for key, reference in named.items() if reference is not None}


def _is_here(reference: str) -> bool:
    return find_spec(re.split("[.:]", reference)[0]) is not None


def _terms(given: Mapping[str, Any], num_clients: int | None) -> Terms:
    """The terms as given, of as many clients as they or `num_clients` say."""
    count = given.get("num_clients", num_clients or DEFAULT_CLIENTS)
    if num_clients not in (None, count):
        raise ValueError(f"deploy.num_clients is {count}, but --clients says {num_clients}: give only one of them")
    terms: Terms = parse_section(Terms, {**given, "num_clients": count}, "deploy")
    return terms


def _suit(values: dict[str, Any], num_clients: int) -> None:
    """Digits in as many rotations as make even groups, of two clients if they can; else clients that differ in labels.

    Rotations that were asked for are kept, and each makes a group.
    """
    given: tuple[int, ...] | None = parse_section(DataConfig, values["data"], "data").rotations
    if given is not None and (not given or num_clients % len(given)):
        raise ValueError(
            f"data.rotations must be as many as divide {num_clients} clients evenly, got {list(given)}; "
            "or say with data.partition which client holds which"
        )
    counts = [len(given)] if given else sorted((4, 3, 2), key=lambda count: num_clients < 2 * count)  # stable
    groups = next((count for count in counts if num_clients % count == 0), None)
    if groups is None:
        values["data"]["partition"] = f"label(0,{num_clients},0.5)"
    else:
        values["data"]["partition"] = f"feature({groups},{num_clients // groups})"
        values["data"]["rotations"] = list(given or ROTATIONS[:groups])
    values["method"].setdefault("num_clusters", groups or min(2, num_clients))


def _check_partition(data: DataConfig, num_clients: int) -> None:
    """Nothing happens if the partition makes that many clients, or if only its file knows how many."""
    if DATASETS[data.name].has_sites if data.name in DATASETS else False:
        raise ValueError(f"data set {data.name!r}: a table's sites agree on its preparation on one machine only; here "
                         "each client brings prepared rows by --data-factory, such as bcfl.data.tables.Form.read("
                         "'table.json').examples(frame) of an earlier run")  # fmt: skip
    least = data.min_examples, data.min_test_examples
    count = parse_specification(data.partition, data.share_floor, least).num_clients
    if count and count != num_clients:
        raise ValueError(
            f"data.partition {data.partition!r} makes {count} clients, the federation has {num_clients} (--clients)"
        )
