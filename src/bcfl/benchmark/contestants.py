"""Who takes part in the benchmark: methods of bcfl by their names, and those that are no federated method."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bcfl.benchmark.tasks import Task
from bcfl.methods import entry_of

ALONE, POOLED, STATISTICIAN = "local", "pooled", "mixed-model"
CLUSTERS = 4  # what methods that are told a number of clusters are told, where there are sites enough


@dataclass(frozen=True)
class Contestant:
    """A name in the tables, and what stands behind it."""

    name: str
    says: str
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[Mapping[str, Any], ...] = ()  # what tuning may choose among, beside the options as they are
    chooses_itself: bool = False  # by held-out evidence within its training rows: nothing is chosen for it

    @property
    def serves_newcomers(self) -> bool:
        """Whether it says anything of a site that it was not trained on."""
        return self.name != ALONE

    @property
    def federated(self) -> bool:
        return self.name not in (POOLED, STATISTICIAN)

    def takes(self, task: Task, model: str) -> bool:
        """Whether it has an answer to such a task with such a model."""
        return self.name != STATISTICIAN or (task.kind == "real" and model == "linear")

    def options_for(self, num_sites: int) -> dict[str, Any]:
        """Its options, where a number of clusters leaves two sites in each."""
        known = entry_of(self.name).options if self.federated else ()
        clusters = {"num_clusters": max(1, min(CLUSTERS, num_sites // 2))} if "num_clusters" in known else {}
        return {**clusters, **self.options}


def _rates() -> tuple[Mapping[str, Any], ...]:
    return ({"learning_rate": 0.01}, {"learning_rate": 0.2})


def _proximal(*values: float) -> tuple[Mapping[str, Any], ...]:
    return tuple({"proximal": value} for value in values)


def _clusters() -> tuple[Mapping[str, Any], ...]:
    return ({"num_clusters": 2}, {"num_clusters": 6})


CONTESTANTS: dict[str, Contestant] = {
    one.name: one
    for one in (
        Contestant(ALONE, "every site alone", grid=_rates()),
        Contestant(POOLED, "all rows in one place, one model: not federated, the ceiling for one model", grid=_rates()),
        Contestant(STATISTICIAN, "statsmodels' mixed-effects model, every coefficient differs by site: not federated"),
        Contestant("fedavg", "one model, averaged by rows", grid=_rates()),
        Contestant("fedprox", "one model, sites held near it", grid=_proximal(0.01, 1.0)),
        Contestant("ditto", "a model per site, held near the averaged one", grid=_proximal(0.01, 1.0)),
        Contestant("fedrep", "one body, a last layer per site", grid=_rates()),
        Contestant("ifca", "each site picks the cluster with the least loss", grid=_clusters()),
        Contestant("wecfl", "k-means on the sites' models", grid=_clusters()),
        Contestant("fedamp", "a model per site, drawn to those alike", grid=_proximal(0.1, 10.0)),
        Contestant("bcfl-g", "the paper's: the best association of each round", grid=_clusters()),
        Contestant("bcfl-c-3", "the paper's: three associations merged", grid=_clusters()),
        Contestant("bcfl-mh-3", "the paper's: three hypotheses carried on", grid=_clusters()),
        Contestant("bcfl", "the default: clusters whose members differ, by held-out evidence", chooses_itself=True),
        Contestant("bcfl-soft", "soft membership by its posterior, in learning and prediction", grid=_clusters()),
    )
}


def contestants_named(names: str | None) -> list[Contestant]:
    """The contestants of these comma-separated names, or all; any method that bcfl knows may be entered."""
    if names is None:
        return list(CONTESTANTS.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    return [CONTESTANTS[name] if name in CONTESTANTS else _entered(name) for name in wanted]


def _entered(name: str) -> Contestant:
    return Contestant(name, entry_of(name).summary)
