"""The methods by name. To add one: write its class, add one entry here; the conformance tests pick it up."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from bcfl.federation import Method
from bcfl.methods.attentive import FedAMP, FedSoft
from bcfl.methods.averaging import BPFedAvg, FedAvg, Local
from bcfl.methods.bcfl import BCFL
from bcfl.methods.births import AutoBCFL
from bcfl.methods.hard import IFCA, KMeansClustering

WARM_UP_ROUNDS = 2  # what -w stands for, unless method.warm_up_rounds says otherwise


@dataclass(frozen=True)
class Entry:
    """A method's name as users write it, what it does in one line, and how its name sets its options."""

    name: str
    summary: str
    build: type
    fixed: Mapping[str, Any]  # options that the name implies
    remark: str = ""  # what must be known where its numbers stand beside those of others


METHODS = {
    entry.name: entry
    for entry in (
        Entry(
            "bcfl-g", "greedy: the best association of each round", BCFL, {"strategy": "greedy", "max_hypotheses": 1}
        ),
        Entry("bcfl-c-M", "consensus: the M best associations, merged into one", BCFL, {"strategy": "consensus"}),
        Entry("bcfl-mh-M", "multi-hypothesis: the M best stories, carried on", BCFL, {"strategy": "multi"}),
        Entry("bcfl-auto", "finds the number of clusters: they are born, joined and die", AutoBCFL, {}),
        Entry("local", "no federation: each client alone", Local, {}),
        Entry("fedavg", "one global model, averaged by examples", FedAvg, {}),
        Entry(
            "bp-fedavg",
            "one global belief, tested after each client's adaptation",
            BPFedAvg,
            {},
            "bp-fedavg is tested after each client's adaptation",
        ),
        Entry("fedamp", "personal models, attentive message passing", FedAMP, {}),
        Entry("fesem", "k-means on the clients' models", KMeansClustering, {"weighted": False}),
        Entry("wecfl", "k-means on the clients' models, weighted by examples", KMeansClustering, {"weighted": True}),
        Entry("fedsoft", "soft membership, proximal personal models", FedSoft, {}),
        Entry("ifca", "each client picks the cluster model with the least loss", IFCA, {}),
    )
}
_BCFL_NAME = re.compile(r"(?P<stem>bcfl-g|bcfl-(?:c|mh)-(?P<count>\d+))(?P<warm>-w)?")


def remarks(names: Iterable[str]) -> list[str]:
    """What must be said beside a comparison of these methods."""
    compared = {_look_up(name)[0].name for name in names}
    return [entry.remark for entry in METHODS.values() if entry.remark and entry.name in compared]


def option_types() -> dict[str, Any]:
    """Every option that some method has, and its type."""
    implied = {option for entry in METHODS.values() for option in entry.fixed}
    hints = {name: hint for entry in METHODS.values() for name, hint in get_type_hints(entry.build).items()}
    return {name: hint for name, hint in hints.items() if name not in implied}


def make_method(name: str, options: Mapping[str, Any]) -> Method:
    """The method of that name with those options; options that only other methods have are left aside."""
    entry, implied = _look_up(name)
    unknown = sorted(set(options) - option_types().keys())
    if unknown:
        raise ValueError(f"unknown method option {unknown[0]!r}, allowed: {', '.join(sorted(option_types()))}")
    own = get_type_hints(entry.build).keys()
    method: Method = entry.build(**{**implied, **{key: value for key, value in options.items() if key in own}})
    return method


def method_of(section: Mapping[str, Any]) -> Method:
    """The method that a section of settings describes, by its name and its options."""
    return make_method(section["name"], {key: value for key, value in section.items() if key != "name"})


def _look_up(name: str) -> tuple[Entry, dict[str, Any]]:
    """The entry behind a name, and the options that the name sets."""
    if match := _BCFL_NAME.fullmatch(name):
        stem, count = match["stem"], match["count"]
        entry = METHODS[stem if count is None else re.sub(r"\d+$", "M", stem)]
        implied = dict(entry.fixed)
        if count is not None:
            implied["max_hypotheses"] = int(count)
            if int(count) < 1:
                raise ValueError(f"method {name!r} must keep at least 1 hypothesis")
        if match["warm"]:
            implied["warm_up_rounds"] = WARM_UP_ROUNDS
        return entry, implied
    if name in METHODS and not name.endswith("-M"):
        return METHODS[name], dict(METHODS[name].fixed)
    examples = [key.replace("-M", "-3") for key in METHODS]
    near = difflib.get_close_matches(name, examples, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown method {name!r}; {hint}known: {', '.join(METHODS)} (M a number, -w for warm-up)")
