"""Frozen splits: which rows of a site are held out, and which sites are newcomers, by a rule and checksums."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from bcfl.benchmark.sources import Array, Rows
from bcfl.benchmark.tasks import Task

NUM_DRAWS = 3  # of each split are frozen
NEWCOMERS = 0.2  # of the sites


@dataclass(frozen=True)
class Split:
    """Who is trained on, what is held out, and which sites are kept out whole."""

    train: dict[str, Array]  # site -> rows, ascending
    test: dict[str, Array]
    newcomers: tuple[str, ...]  # of the sites, for those who ask how whole sites are served that were never seen


def split(task: Task, rows: Rows, draw: int) -> Split:
    """Half of every site's people are held out, by the order of a hash of their names; and so a fifth of the sites.

    A person with rows at several sites belongs to the first of them, so that nobody is both trained on and tested.
    Sites that are left without rows on either side, or with fewer than two to train on, are left out.
    """
    home: dict[str, str] = {}
    for person, site in zip(rows.person.tolist(), rows.site.tolist(), strict=True):
        home.setdefault(person, site)
    people: dict[str, list[str]] = {}
    for person, site in home.items():
        people.setdefault(site, []).append(person)
    held_out = set[str]()
    for own in people.values():
        ranked = sorted(own, key=lambda person: _hash(task, draw, person))
        held_out.update(ranked[max(1, len(own) // 2) :])
    tested = np.array([person in held_out for person in rows.person.tolist()])
    places = {site: np.flatnonzero(rows.site == site) for site in np.unique(rows.site).tolist()}
    train = {site: place[~tested[place]] for site, place in places.items()}
    test = {site: place[tested[place]] for site, place in places.items()}
    sites = [site for site in places if len(train[site]) >= 2 and len(test[site]) >= 1]
    newcomers = sorted(sites, key=lambda site: _hash(task, draw, f"newcomer {site}"))[: round(NEWCOMERS * len(sites))]
    return Split({site: train[site] for site in sites}, {site: test[site] for site in sites}, tuple(sorted(newcomers)))


def _hash(task: Task, draw: int, what: str) -> bytes:
    return hashlib.blake2b(f"{task.name}/{draw}/{what}".encode(), digest_size=8).digest()


def checksums(task: Task, rows: Rows) -> dict[str, Any]:
    """What is written down of a task: how many rows and sites, and what its data and each of its splits hash to."""
    data = hashlib.sha256()
    for column in (rows.site, rows.person, rows.target, *rows.inputs.values()):
        data.update(_bytes(column))
    drawn = [split(task, rows, draw) for draw in range(NUM_DRAWS)]
    return {
        "rows": len(rows.site),
        "sites": len(drawn[0].train),
        "data": data.hexdigest()[:16],
        "splits": [_digest(one) for one in drawn],
    }


def _bytes(column: Array) -> bytes:
    """A column to about six digits, so that another machine's last bits are no other data."""
    if column.dtype.kind == "U":
        return "\n".join(column.tolist()).encode()
    return "\n".join(f"{value:.5e}" for value in column.ravel().tolist()).encode()


def _digest(drawn: Split) -> str:
    parts = [[site, drawn.train[site].tolist(), drawn.test[site].tolist()] for site in drawn.train]
    return hashlib.sha256(json.dumps([parts, drawn.newcomers]).encode()).hexdigest()[:16]


@cache
def frozen() -> dict[str, dict[str, Any]]:
    """The checksums as they are written down."""
    found: dict[str, dict[str, Any]] = json.loads(files("bcfl.benchmark").joinpath("splits.json").read_text())
    return found


def verify(task: Task, rows: Rows) -> None:
    """Nothing happens if these are the rows and splits that were frozen."""
    now, then = checksums(task, rows), frozen().get(task.name)
    if now != then:
        changed = [key for key in now if then is None or now[key] != then[key]]
        raise ValueError(f"task {task.name}: {changed[0]} is not what was frozen (splits.json): another version of the "
                         f"package that brings it? {task.licence}")  # fmt: skip
