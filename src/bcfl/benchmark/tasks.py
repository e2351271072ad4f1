"""The tasks of the benchmark, as `tasks.toml` describes them."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Kind = Literal["real", "yes/no", "classes", "time"]
MEASURES: dict[Kind, str] = {"real": "rmse", "yes/no": "accuracy", "classes": "accuracy", "time": "concordance"}
LIKELIHOODS: dict[Kind, str] = {"real": "normal", "yes/no": "bernoulli", "classes": "categorical", "time": "weibull"}


@dataclass(frozen=True)
class Task:
    """One federation: rows of a public table, each held by a site, and a target that is told from inputs."""

    name: str
    title: str
    kind: Kind
    source: tuple[str, ...]  # its reader, of bcfl.benchmark.sources, and what that is asked for
    sites_are: str
    site: str  # the column that says whose a row is
    target: tuple[str, ...]  # one column, or a time and whether it was seen to end
    inputs: tuple[str, ...]
    licence: str
    citation: str
    structure: str  # what is known of how the sites differ
    person: str | None = None  # whose rows stay together, where a person has several
    least: int = 4  # rows of a site that takes part
    first: int | None = None  # only so many sites, in the order in which they come
    control: bool = False  # made or arranged, with clusters that are known

    @property
    def measure(self) -> str:
        """What is told beside the log-likelihood."""
        return MEASURES[self.kind]

    @property
    def likelihood(self) -> str:
        return LIKELIHOODS[self.kind]


@cache
def all_tasks() -> dict[str, Task]:
    """Every task by its name, in the order of the file."""
    found = tomllib.loads(files("bcfl.benchmark").joinpath("tasks.toml").read_text())
    return {name: _task(name, section) for name, section in found.items()}


def _task(name: str, section: dict[str, Any]) -> Task:
    rows = {key: tuple(value) for key, value in section.items() if isinstance(value, list)}
    return Task(name=name, **{**section, **rows})


def tasks_named(names: str | None) -> list[Task]:
    """The tasks of these comma-separated names, or all."""
    known = all_tasks()
    if names is None:
        return list(known.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--tasks: unknown task {name!r}, known: {', '.join(known)}")
    return [known[name] for name in wanted]
