"""What a table's target columns are: classes with their names, real values, counts, or times with a censoring flag."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bcfl.data.frames import Array, Column, Columns, wanted
from bcfl.data.preparation import CategorySums, NumberSums
from bcfl.likelihood import Family, Likelihood, parse

Name = str | int | bool | float


@dataclass(frozen=True)
class Target:
    """Which columns are the target and how they become y; classes are numbered in the order of their names."""

    columns: tuple[str, ...]  # one, or time and event
    likelihood: str  # its name, and what of it the training rows say, as a setting has it
    classes: tuple[Name, ...] = ()  # of a target that is a class
    extras: Mapping[str, str] = dataclasses.field(default_factory=dict)  # weight, offset or exposure -> column

    @property
    def num_outputs(self) -> int:
        """How many numbers a network must give for a row."""
        return parse(self.likelihood).family.num_outputs or len(self.classes)

    def encode(self, columns: Columns, site: str) -> Tensor:
        """y of these rows, in the user's own units."""  # (row,), or (row, column) with times or extra columns
        found = [_complete(columns, name, site, "is the target") for name in self.columns]
        if self.classes:
            y = torch.from_numpy(self._numbered(found[0], site))
        else:
            for name, column in zip(self.columns, found, strict=True):
                if column.values.dtype == object:
                    raise ValueError(f"site {site!r}: target {name!r} must hold numbers, but holds {column.kind}")
            y = torch.from_numpy(np.stack([column.values for column in found], 1)).float()
            y = y[:, 0] if y.shape[1] == 1 else y
        if not self.extras:
            return y
        further = [_complete(columns, name, site, f"is the {extra}") for extra, name in self.extras.items()]
        for extra, column in zip(self.extras, further, strict=True):
            _check_extra(extra, self.extras[extra], column, site)
        parts = [y[:, None] if y.dim() == 1 else y, *(torch.from_numpy(one.values)[:, None] for one in further)]
        return torch.cat([part.float() for part in parts], 1)

    def _numbered(self, column: Column, site: str) -> Array:
        number_of = {str(name): number for number, name in enumerate(self.classes)}
        texts = column.texts()
        unknown = [text for text in texts if text not in number_of]
        if unknown:
            raise ValueError(f"site {site!r}: target {self.columns[0]!r} is {unknown[0]!r}, which no training row has; "
                             f"the classes are {', '.join(map(repr, self.classes))}")  # fmt: skip
        return np.array([number_of[text] for text in texts], np.int64)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(kept: Mapping[str, Any]) -> "Target":
        return Target(tuple(kept["columns"]), kept["likelihood"], tuple(kept["classes"]), dict(kept["extras"]))


def target_of(
    names: tuple[str, ...], likelihood: str | None, extras: Mapping[str, str], sites: Mapping[str, Columns]
) -> Target:
    """The target that all sites' training rows have: what they must agree on comes from sums that each tells."""
    per_site = {site: [_complete(columns, name, site, "is the target") for name in names]
                for site, columns in sites.items()}  # fmt: skip
    first = [found[0] for found in per_site.values()]
    kind = _kind(names[0], first)
    said = likelihood or ("censored" if len(names) == 2 else _chosen(names[0], kind, first))
    asked = parse(said)
    asked = Likelihood(asked.family, tuple(extras), asked.per)
    if (len(names) == 2) != (asked.family.kind == "times"):
        raise ValueError(f"target must be two columns, (time, event), for likelihood censored and only for it, got "
                         f"{', '.join(map(repr, names))} with likelihood {asked.name}")  # fmt: skip
    classes: tuple[Name, ...] = ()
    if asked.family.kind == "classes":
        classes = _classes(names[0], first)
    else:
        _check_numbers(asked.family, names, per_site)
    told = sum((NumberSums.of(column.values) for column in first if column.values.dtype != object), NumberSums())
    fitted = replace(asked, family=_in_units(asked.family, told, len(classes)))
    return Target(names, fitted.spec, classes, extras)


def _in_units(family: Family, told: NumberSums, num_classes: int) -> Family:
    """The family in the units of all sites' training rows, by the sums that they tell."""
    deviation = (told.squares / told.count) ** 0.5 if told.count else 0.0
    found = {"center": told.mean, "spread": deviation if deviation > 0 else 1.0, "unit": told.mean}
    open_ones = {name: float(f"{found[name]:.6g}") for name in found if getattr(family, name, ...) is None}
    if family.name == "ordinal":
        open_ones = {"num_classes": num_classes}
    if getattr(family, "edges", ...) is None:
        raise ValueError("likelihood hazard: its edges must be given for a table, as in hazard(edges=30+90+365)")
    made: Family = replace(family, **open_ones)  # type: ignore[type-var]
    return made


def _complete(columns: Columns, name: str, site: str, purpose: str) -> Column:
    column = wanted(columns, name, purpose, f"site {site!r}")
    if missing := int(column.missing.sum()):
        raise ValueError(f"site {site!r}: column {name!r} {purpose}, but has no value in {missing} of "
                         f"{len(column.values)} rows: leave these rows out")  # fmt: skip
    return column


def _kind(name: str, columns: Sequence[Column]) -> str:
    kinds = list(dict.fromkeys(column.kind for column in columns))
    if "dates" in kinds or not set(kinds) <= {"truth", "whole", "number", "text"}:
        raise ValueError(f"target {name!r} holds {kinds[0]}: it must be classes, numbers, or (time, event)")
    return kinds[0] if len(kinds) == 1 else "number"


def _chosen(name: str, kind: str, columns: Sequence[Column]) -> str:
    """The likelihood that suits beyond doubt."""
    if kind in ("truth", "text"):
        return "categorical"
    values = np.unique(np.concatenate([np.unique(column.values) for column in columns]))
    if len(values) <= 2 and bool((values == np.rint(values)).all()):
        return "categorical"
    if kind == "number":
        return "normal"
    raise ValueError(f"target {name!r} holds whole numbers, {len(values)} different ones from {values[0]:g} to "
                     f"{values[-1]:g}, and these may be several things: say likelihood= categorical, ordinal, poisson, "
                     "negative_binomial or normal")  # fmt: skip


def _classes(name: str, columns: Sequence[Column]) -> tuple[Name, ...]:
    """The names of the classes, by how often each site says that it has them, in their natural order."""
    counts = reduce(lambda a, b: a + b, [CategorySums.of(column.texts()) for column in columns]).counts
    if len(counts) < 2:
        raise ValueError(f"target {name!r} is {next(iter(counts))!r} in every training row of every site: there is "
                         "nothing to tell apart")  # fmt: skip
    if columns[0].kind == "text":
        if 2 * len(counts) > sum(counts.values()) and len(counts) > 10:
            raise ValueError(f"target {name!r} holds {len(counts)} different texts in {sum(counts.values())} training "
                             "rows: no likelihood fits free text")  # fmt: skip
        return tuple(sorted(counts))
    if columns[0].kind == "truth":
        return (False, True)
    values = sorted(map(float, counts))
    return tuple(int(value) if value.is_integer() else value for value in values)


def _check_numbers(family: Family, names: Sequence[str], per_site: Mapping[str, Sequence[Column]]) -> None:
    """Nothing happens if every site's values are such as the likelihood can have."""
    for site, found in per_site.items():
        who = f"site {site!r}: target {names[0]!r}"
        if found[0].values.dtype == object:
            raise ValueError(f"{who} holds {found[0].kind}s, but likelihood {family.name} needs numbers")
        values = found[0].values
        if family.kind == "counts" and bool(((values < 0) | (values != np.rint(values))).any()):
            raise ValueError(f"{who} must hold whole numbers of at least 0, as likelihood {family.name} says")
        if family.kind == "labels" and not np.isin(values, (0, 1)).all():
            raise ValueError(f"{who} must hold 0 and 1 only, as likelihood {family.name} says")
        if family.kind in ("pixels", "tokens"):
            raise ValueError(f"{who}: likelihood {family.name} is not for tables")
        if family.kind == "times":
            if bool((values <= 0).any()):
                raise ValueError(f"{who} holds the time {values.min():g}: times must be above 0")
            _check_flag(site, names[1], found[1])


def _check_flag(site: str, name: str, column: Column) -> None:
    if column.values.dtype == object or not np.isin(column.values, (0, 1)).all():
        texts = column.texts()
        odd = next(text for text in texts if text not in ("0", "1", "True", "False"))
        raise ValueError(f"site {site!r}: event {name!r} must be 1 where the event was seen and 0 where it was not by "
                         f"then, but holds {odd!r}")  # fmt: skip


def _check_extra(extra: str, name: str, column: Column, site: str) -> None:
    if column.values.dtype == object:
        raise ValueError(f"site {site!r}: {extra} {name!r} must hold numbers, but holds {column.kind}s")
    if extra != "offset" and bool((column.values < 0).any()):
        raise ValueError(f"site {site!r}: {extra} {name!r} must be at least 0, but holds {column.values.min():g}")
