"""Which runs are averaged, and what tells the others apart: their method, and the settings in which they differ."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

# What may differ between runs that are averaged: who drew the numbers, where the data lay, when a run was looked at.
NOT_A_SETTING = {
    "experiment.seed",
    "data.seed",
    "data.path",
    "experiment.checkpoint_every",
    "experiment.evaluate_every",
}


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


def in_words(method: str, settings: Mapping[str, Any]) -> str:
    """A method and what else tells its runs from others."""
    return " ".join([method, *(f"{title_of(key)} {text_of(value)}" for key, value in settings.items())])


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


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Mean and sample standard deviation (0 for a single value); None where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0
