"""From a configuration file and a number of clients to the settings of a deployed federation."""

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bcfl.engines.flower import Terms
from bcfl.experiment.config import Config, apply_override, parse_config, parse_section, read_toml, set_value

ROTATIONS = (0, 90, 180, 270)


def read_settings(
    path: Path | None, overrides: Iterable[str], num_clients: int, seed: int | None = None
) -> tuple[Config, dict[str, Any]]:
    """The run's configuration and the federation's terms; what is left open suits the number of clients."""
    values: dict[str, Any] = read_toml(path) if path else {}
    for override in overrides:
        apply_override(values, override)
    if seed is not None:
        set_value(values, "experiment.seed", seed)
    terms: Terms = parse_section(Terms, {**values.pop("deploy", {}), "num_clients": num_clients}, "deploy")
    terms.check()
    data = values.setdefault("data", {})
    if not {"name", "partition", "factory"} & data.keys():
        _suit(values, num_clients)
    config = parse_config(values)
    count = _clients_of(config.data.partition)
    if config.data.factory is None and count not in (None, num_clients):
        raise ValueError(
            f"data.partition {config.data.partition!r} makes {count} clients, --clients says {num_clients}"
        )
    return config, asdict(terms)


def _suit(values: dict[str, Any], num_clients: int) -> None:
    """Digits in as many rotations as divide the clients evenly; where none do, clients that differ in their labels."""
    groups = next((count for count in (4, 3, 2) if num_clients % count == 0), None)
    if groups is None:
        values["data"]["partition"] = f"label(0,{num_clients},0.5)"
    else:
        values["data"] |= {
            "partition": f"feature({groups},{num_clients // groups})",
            "rotations": list(ROTATIONS[:groups]),
        }
    values.setdefault("method", {}).setdefault("num_clusters", groups or min(2, num_clients))


def _clients_of(partition: str) -> int | None:
    """How many clients a partition makes; None if that is not written in it."""
    found = re.match(r"\s*(?:feature|label)\(\s*(\d+)\s*,\s*(\d+)", partition)
    return max(int(found[1]), 1) * int(found[2]) if found else None
