"""What the files of a run folder may hold: what is read from one is of these kinds, or is named in one line."""

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bcfl.likelihood.measures import TITLES

MOST = 10**15  # that of a thousand rounds can be added up
MOST_ROWS = 10_000  # hypotheses of a round
MOST_EXAMPLES = 10**9  # of one class at one client
# Measures that are not finite where a model's own numbers overflow: that is no damage, and counts as not measured.
LOOSE = tuple(name for name in TITLES if name not in ("accuracy", "macro_f1"))
PACKED_FROM = 100_000  # clients: of so many, where they are is kept as binary, and nothing of single ones beside it
SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True)
class Kind:
    """Values of one kind, and what they are called in a message."""

    words: str
    holds: Callable[[Any], bool]
    optional: bool = False  # the key may be absent


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.holds(value))


def or_absent(kind: Kind) -> Kind:
    """A key that may be null, and may be missing."""
    return replace(or_null(kind), optional=True)


def whole(low: int, high: int = MOST) -> Kind:
    words = f"a whole number of at least {low}" if high == MOST else f"a whole number from {low} to {high}"
    return Kind(words, lambda value: type(value) is int and low <= value <= high)


def number(low: float, high: float = MOST) -> Kind:
    words = f"a number of at least {low:g}" if high == MOST else f"a number from {low:g} to {high:g}"
    return Kind(words, lambda value: type(value) in (int, float) and low <= value <= high)


def list_of(kind: Kind, length: int | None = None) -> Kind:
    count = "" if length is None else f"{length} "
    return Kind(
        f"a list of {count}entries, each {kind.words}",
        lambda value: (
            isinstance(value, list) and (length is None or len(value) == length) and all(map(kind.holds, value))
        ),
    )


OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def _is_plain(value: Any, depth: int = 3) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(one, depth - 1) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


# Control characters could make a terminal do things that nobody asked of it.
TEXT = Kind("a text without control characters", lambda value: isinstance(value, str) and value.isprintable())
SHARE = number(0, 1)
ANY_NUMBER = Kind("a number", lambda value: type(value) in (int, float))
SECTION = Kind("a section of settings, each a number, text, truth value or list of those",
               lambda value: isinstance(value, dict) and all(map(_is_plain, value.values())))  # fmt: skip
SECTIONS = dict.fromkeys(("data", "model", "method", "training", "experiment"), SECTION)
SEED = whole(0, 2**64)
SETTINGS = {  # those that a report asks for by name; every run writes all of its settings down
    "method": {"name": TEXT, "num_clusters": or_absent(whole(1))},
    "experiment": {"rounds": whole(1), "seed": SEED},
    "data": {"factory": or_null(TEXT), "seed": or_null(SEED)},
    "model": {"factory": or_null(TEXT)},
}
WORK = Kind("an object of whole numbers of at least 0",
            lambda value: isinstance(value, dict) and all(map(whole(0).holds, value.values())))  # fmt: skip
START = {"round": whole(0, 0), "work": WORK}
TIMING = {"round": whole(1), "seconds": number(0)}
ASSOCIATION = {"round": whole(1), "log_weight": list_of(ANY_NUMBER), "events": or_absent(list_of(OBJECT))}
EVENTS = ("birth", "merge", "death")  # others, of a later version, are left aside


def manifest_kinds(found: Any) -> dict[str, Kind]:
    """What a manifest must hold; lengths go by the numbers of clients and classes that it names itself."""
    clients, rows = (found.get(key) if isinstance(found, dict) else None for key in ("num_clients", "train_labels"))
    classes = len(rows[0]) if isinstance(rows, list) and rows and isinstance(rows[0], list) else 1
    groups = or_null(list_of(whole(0), clients))
    drift = Kind(f"an object of a round and the group from then on, {groups.words}",
                 lambda value: isinstance(value, dict) and whole(1).holds(value.get("round"))
                 and groups.holds(value.get("group", ...)))  # fmt: skip
    return {
        "num_clients": whole(1),
        "group": groups,
        "train_labels": or_absent(list_of(list_of(whole(0, MOST_EXAMPLES), max(classes, 1)), clients)),
        "drift": or_absent(drift),
        "sizes": or_absent(list_of(whole(1, MOST_EXAMPLES), 2)),
        "num_train": or_absent(list_of(whole(0, MOST_EXAMPLES), clients)),
        "names": or_absent(list_of(TEXT, clients)),
        **dict.fromkeys(("sha256", "dataset", "partition", "likelihood"), or_absent(TEXT)),
    }


def round_kinds(clients: int) -> dict[str, Kind]:
    """What a line of rounds.jsonl must hold, from round 1 on; measures are there where the round was evaluated."""
    bins = Kind("a count and two sums", lambda value: isinstance(value, list) and len(value) == 3
                and number(0).holds(value[0]) and all(map(ANY_NUMBER.holds, value)))  # fmt: skip
    return {
        "round": whole(1),
        "work": WORK,
        "num_hypotheses": whole(0),
        "changes": whole(0, clients),
        "ari": or_absent(number(-1, 1)),
        "client_accuracy": or_absent(list_of(or_null(SHARE), clients)),
        "calibration": or_absent(list_of(bins)),
        **dict.fromkeys(("accuracy", "macro_f1"), or_absent(SHARE)),
        "lead": or_absent(
            Kind(
                f"an object with a measure, one of {', '.join(TITLES)}",
                lambda value: isinstance(value, dict) and value.get("measure") in TITLES,
            )
        ),
        **dict.fromkeys(LOOSE, or_absent(ANY_NUMBER)),
        **{f"client_{name}": or_absent(list_of(or_null(ANY_NUMBER), clients)) for name in LOOSE},
    }


def association_kinds(clients: int, clusters: int, hypotheses: int, parents: int) -> dict[str, Kind]:
    """What a line of associations.jsonl must hold, given how many there are of each; −1 was never associated."""
    return {
        "parent": list_of(whole(0, parents - 1), hypotheses),
        "assignment": list_of(list_of(whole(-1, clusters - 1), clients), hypotheses),
        "probability": or_absent(_membership_kind(clients, clusters, hypotheses)),
    }


def _membership_kind(clients: int, clusters: int, hypotheses: int) -> Kind:
    """How likely each client belongs to each cluster: a number where it is sure, else a probability of each."""

    def holds(value: Any) -> bool:
        if not isinstance(value, dict) or set(value) != {"num_clusters", "rows", "of_parents"}:
            return False
        count, rows = value["num_clusters"], value["rows"]
        if not whole(1, clusters).holds(count) or not isinstance(value["of_parents"], bool):
            return False
        sure, unsure = whole(0, count - 1), list_of(SHARE, count)
        one = Kind("a cluster or its probabilities", lambda own: sure.holds(own) or unsure.holds(own))
        return list_of(list_of(one, clients)).holds(rows) and 1 <= len(rows) <= hypotheses

    return Kind("memberships: num_clusters, rows of each parent's clients, and of_parents", holds)


def event_kinds(hypotheses: int) -> dict[str, Kind]:
    return {"hypothesis": whole(0, hypotheses - 1), "cluster": whole(0), "from": or_absent(list_of(whole(0)))}


def check(found: Any, kinds: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """What was found there, an object whose values are of these kinds; keys without a kind may hold anything."""
    if not isinstance(found, dict):
        raise ValueError(f"{where} must hold a JSON object, got {shown(found)}")
    for key, kind in kinds.items():
        if key not in found and not kind.optional:
            needed = ", ".join(name for name, one in kinds.items() if not one.optional)
            raise ValueError(f"{where} must hold {needed}; {key} is missing")
        if key in found and not kind.holds(found[key]):
            raise ValueError(f"{where}: {key} must be {kind.words}, got {shown(found[key])}")
    return found


def shown(value: Any) -> str:
    """The value as JSON, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def read_object(path: Path, kinds: Callable[[Any], Mapping[str, Kind]] = lambda _: {}) -> dict[str, Any]:
    found = _parsed(_content(path), str(path))
    return check(found, kinds(found), str(path))


def read_manifest(folder: Path) -> dict[str, Any]:
    return read_object(folder / "manifest.json", manifest_kinds)


def read_timings(folder: Path) -> list[dict[str, Any]]:
    return _lines(folder / "timings.jsonl", lambda _: TIMING)


def read_rounds(folder: Path, clients: int) -> list[dict[str, Any]]:
    """The metrics of every round, round 0 first."""
    return _lines(folder / "rounds.jsonl", lambda index: round_kinds(clients) if index else START, first=0)


def read_associations(folder: Path, clients: int, asked_clusters: int) -> list[dict[str, Any]]:
    """The hypotheses of every round, round 1 first."""
    path, parents, found = folder / "associations.jsonl", MOST, []
    for number, line in enumerate(_lines(path, lambda _: ASSOCIATION), 1):
        where, weights = f"{path}, line {number}", line["log_weight"]
        if max(weights, default=0) > 1 or not abs(sum(map(math.exp, weights)) - 1) < 1e-6:
            raise ValueError(
                f"{where}: log_weight must be logarithms of weights that add up to 1, got {shown(weights)}"
            )
        line["assignment"] = _unpacked(line.get("assignment"), clients, where)
        check(line, association_kinds(clients, max(clients, asked_clusters), len(weights), parents), where)
        placed = [[cluster >= 0 for cluster in row] for row in line["assignment"]]
        if any(row != placed[0] for row in placed):
            raise ValueError(f"{where}: assignment must place the same clients in all hypotheses")
        for event in line.get("events") or ():
            if event.get("kind") in EVENTS:
                check(event, event_kinds(len(weights)), f"{where}, events")
        found.append(line)
        parents = len(weights)
    return found


def rows_to_json(rows: Tensor) -> Any:
    """Rows of small whole numbers for JSON: as they are or, where they are long, as 16-bit numbers in zlib, base64."""
    if rows.shape[1] < PACKED_FROM or not len(rows):
        return rows.tolist()
    content = zlib.compress(rows.numpy().astype("<i2").tobytes(), 6)
    return {"packed": base64.b64encode(content).decode("ascii")}


def _unpacked(found: Any, clients: int, where: str) -> Any:
    """The rows that `rows_to_json` has packed; what is not packed, as it is."""
    if not isinstance(found, dict):
        return found
    try:
        unzip = zlib.decompressobj()
        content = unzip.decompress(base64.b64decode(found["packed"], validate=True), 2 * clients * MOST_ROWS)
        return np.frombuffer(content, "<i2").reshape(-1, clients).tolist()
    except (KeyError, TypeError, ValueError, zlib.error):
        raise ValueError(f"{where}: assignment must be rows of numbers, or packed ones") from None


def _lines(path: Path, kinds: Callable[[int], Mapping[str, Kind]], first: int = 1) -> list[dict[str, Any]]:
    """The lines of a log, one a round from round `first` on, each with what it must hold."""
    if not path.is_file():
        return []
    found = []
    whole_lines = _content(path).split(b"\n")[:-1]  # what follows the last line end is half a line
    for number, line in enumerate(whole_lines, 1):
        where, index = f"{path}, line {number}", number - 1 + first
        found.append(check(_parsed(line, where), {**kinds(index), "round": whole(index, index)}, where))
    return found


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested beyond all bounds
        raise ValueError(f"{where} cannot be read: {error}") from None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
