"""The methods by name. To add one: write its class and register it; the conformance tests pick up what stands here."""

import dataclasses
import difflib
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from bcfl.federation import Method
from bcfl.methods.attentive import FedAMP, FedSoft
from bcfl.methods.auto import AutoBCFL
from bcfl.methods.averaging import BPFedAvg, FedAvg, Local
from bcfl.methods.bcfl import BCFL
from bcfl.methods.hard import IFCA, KMeansClustering
from bcfl.methods.mixed import Mixed
from bcfl.methods.near import Ditto, FedProx
from bcfl.methods.representation import FedRep
from bcfl.methods.soft import SoftBCFL

WARM_UP_ROUNDS = 2  # what -w stands for, unless method.warm_up_rounds says otherwise
MOST_HYPOTHESES = 1000  # each has K beliefs of the model's size
LONGEST_NAME = 200  # letters of a module's name
NEAR = 0.75  # how alike a name must be to be meant
GROUP = "bcfl.methods"  # the entry points of installed packages that bring methods of their own

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=type)


@dataclass(frozen=True)
class Entry:
    """A method's name as users write it, what it does in one line, and how its name sets its options."""

    name: str
    summary: str
    build: type
    fixed: Mapping[str, Any]  # options that the name implies
    remark: str = ""  # what must be known where its numbers stand beside those of others

    @property
    def comes_along(self) -> bool:
        """Whether it is one of bcfl's own."""
        return self.build.__module__.startswith("bcfl.")

    @property
    def options(self) -> tuple[str, ...]:
        """What can be set of it, in the order of its fields."""
        return tuple(field.name for field in dataclasses.fields(self.build) if field.name not in self.fixed)


METHODS = {
    entry.name: entry
    for entry in (
        Entry(
            "bcfl-g",
            "greedy: the best association of each round",
            BCFL,
            {"strategy": "greedy", "max_hypotheses": 1, "hypotheses": "all"},
        ),
        Entry(
            "bcfl-c-M",
            "consensus: the M best associations, merged into one",
            BCFL,
            {"strategy": "consensus", "max_hypotheses": "M"},
        ),
        Entry(
            "bcfl-mh-M",
            "multi-hypothesis: the M best stories, carried on",
            BCFL,
            {"strategy": "multi", "max_hypotheses": "M"},
        ),
        Entry("bcfl-soft", "soft: a client belongs to every cluster by its probability", SoftBCFL, {}),
        Entry("bcfl", "clusters whose members differ, as many as held-out examples ask for", Mixed, {}),
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
        Entry("fedprox", "one global model, clients held near it", FedProx, {}),
        Entry("ditto", "a model per client, held near the averaged one", Ditto, {}),
        Entry("fedrep", "one averaged body, a last layer per client", FedRep, {}),
        Entry("ifca", "each client picks the cluster model with the least loss", IFCA, {}),
    )
}
_BCFL_NAME = re.compile(r"(?P<stem>bcfl-g|bcfl-soft|bcfl-(?:c|mh)-(?P<count>\d+))(?P<warm>-w)?")


def register(name: str, summary: str | None = None) -> Callable[[M], M]:
    """The decorator that offers a frozen dataclass with `init` and `round` as the method `name`.

    Its fields are the method's options; pydantic's Field in their annotation says what each may be and means. Without
    a summary the first line of its docstring is taken.
    """

    def registered(build: M) -> M:
        known = METHODS.get(name)
        if known is not None and (known.build.__module__, known.build.__name__) != (build.__module__, build.__name__):
            raise ValueError(f"method {name!r} is there already: choose another name")
        if not re.fullmatch(r"\w[\w-]*", name) or _BCFL_NAME.fullmatch(name) or name.endswith("-M"):
            raise ValueError(f"a method's name must be letters, digits, _ and -, and none of bcfl's own, got {name!r}")
        if not dataclasses.is_dataclass(build):
            raise ValueError(f"method {name!r} must be a dataclass, got {build.__name__}")
        told = summary or (build.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        METHODS[name] = Entry(name, told, build, {})
        return build

    return registered


def load_plugin(module: str) -> None:
    """The methods that this module registers are known."""
    if not re.fullmatch(r"\w+(\.\w+)*", module) or len(module) > LONGEST_NAME:
        raise ValueError(f"method.plugin must be the name of a module, got {module[:LONGEST_NAME]!r}")
    try:
        importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"method.plugin {module!r} cannot be imported: {type(error).__name__}: {error}") from error


def remarks(names: Iterable[str]) -> list[str]:
    """What must be said beside a comparison of these methods; of one that is not known here, nothing."""
    compared = {entry_of(name).name for name in names if is_known(name)}
    return [entry.remark for entry in METHODS.values() if entry.remark and entry.name in compared]


def owners_of(option: str) -> list[Entry]:
    """The methods that have this option."""
    return [entry for entry in METHODS.values() if option in entry.options]


def all_options() -> list[str]:
    """Every option that some method has."""
    return list(dict.fromkeys(option for entry in METHODS.values() for option in entry.options))


def make_method(name: str, options: Mapping[str, Any]) -> Method:
    """The method of that name with those options; options that only other methods have are left aside."""
    entry, implied = _look_up(name)
    known = all_options()
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown method option {unknown[0]!r}, allowed: {', '.join(sorted(known))}")
    method: Method = entry.build(**{**implied, **{key: options[key] for key in entry.options if key in options}})
    return method


def method_of(section: Mapping[str, Any]) -> Method:
    """The method that a section of settings describes, by its name and its options."""
    return make_method(section["name"], {key: section[key] for key in section.keys() - {"name", "plugin"}})


def entry_of(name: str) -> Entry:
    """The entry behind a name."""
    return _look_up(name)[0]


def is_known(name: str) -> bool:
    """Whether there is such a method: a run may have been made by one that is not installed here."""
    try:
        return bool(_look_up(name))
    except ValueError:
        return False


def _look_up(name: str) -> tuple[Entry, dict[str, Any]]:
    """The entry behind a name, and the options that the name sets."""
    if match := _BCFL_NAME.fullmatch(name):
        stem, count = match["stem"], match["count"]
        entry = METHODS[stem if count is None else re.sub(r"\d+$", "M", stem)]
        implied = dict(entry.fixed)
        if count is not None:
            if not (len(count) <= len(str(MOST_HYPOTHESES)) and 1 <= int(count) <= MOST_HYPOTHESES):
                raise ValueError(f"method {name!r} must keep at least 1 hypothesis, and at most {MOST_HYPOTHESES:,}")
            implied["max_hypotheses"] = int(count)
        if match["warm"]:
            implied["warm_up_rounds"] = WARM_UP_ROUNDS
        return entry, implied
    if name in METHODS and not name.endswith("-M"):
        return METHODS[name], dict(METHODS[name].fixed)
    raise ValueError(f"unknown method {name!r}; {_nearest(name)}known: {', '.join(METHODS)} (M a number, -w for "
                     "warm-up; others by --plugin MODULE)")  # fmt: skip


def _nearest(name: str) -> str:
    """What may have been meant, if anything here is truly near."""
    near = difflib.get_close_matches(name, [key.replace("-M", "-3") for key in METHODS], 1, NEAR)
    return f"did you mean {near[0]!r}? " if near else ""


def _load_installed() -> None:
    """The methods of installed packages are known; a package that cannot be imported is told and left out."""
    for point in entry_points(group=GROUP):
        try:
            importlib.import_module(point.module)  # without its attribute: the module may be what imports this one
        except Exception as error:  # somebody else's module may raise anything
            logger.warning(f"the methods of {point.value} ({GROUP}) cannot be used: {type(error).__name__}: {error}")


_load_installed()
