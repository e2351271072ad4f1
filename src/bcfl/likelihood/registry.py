"""Likelihoods by name, by a setting's text, and by what y looks like."""

import dataclasses
import difflib
import re
from typing import Any

from torch import Tensor

from bcfl.likelihood.classes import Bernoulli, Categorical
from bcfl.likelihood.contract import Family, Likelihood
from bcfl.likelihood.counts import Poisson
from bcfl.likelihood.real import Normal

FAMILIES: dict[str, type[Any]] = {family.name: family for family in (Categorical, Bernoulli, Normal, Poisson)}
CATEGORICAL = Likelihood(Categorical())
OF_ALL = ("extras", "per")
OF_SEVERAL = ("extras", "class_weight")  # options that are rows: written a+b+c


def of(name: str, **options: Any) -> Likelihood:
    """The likelihood of that name with these options: the family's own, and `extras` and `per`."""
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown likelihood {name!r}; {hint}known: {', '.join(FAMILIES)}")
    known = [field.name for field in dataclasses.fields(FAMILIES[name])]
    for option in options:
        if option not in (*known, *OF_ALL):
            raise ValueError(f"likelihood {name}: unknown option {option}; allowed: {', '.join([*known, *OF_ALL])}")
    further = {key: options[key] for key in OF_ALL if key in options}
    if isinstance(further.get("extras"), str):
        further["extras"] = (further["extras"],)
    family: Family = FAMILIES[name](**{key: value for key, value in options.items() if key not in OF_ALL})
    return Likelihood(family, **further)


def parse(text: str) -> Likelihood:
    """The likelihood of a setting's text: a name, and perhaps options in brackets: "normal(scale=network)"."""
    found = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if found is None:
        raise ValueError(f"a likelihood is written name or name(option=value, …), got {text!r}")
    options: dict[str, Any] = {}
    for part in filter(None, map(str.strip, (found[2] or "").split(","))):
        key, equals, value = map(str.strip, part.partition("="))
        if not equals or not key:
            raise ValueError(f"a likelihood's options are written name=value, got {part!r} in {text!r}")
        options[key] = tuple(map(_value, value.split("+"))) if key in OF_SEVERAL else _value(value)
    return of(found[1], **options)


def _value(text: str) -> Any:
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def choose(y: Tensor, who: str = "y") -> Likelihood:
    """The likelihood that suits these targets beyond doubt: whole numbers are classes, real ones normal."""
    if y.dim() == 1 and y.is_floating_point():
        return Likelihood(Normal())
    if y.dim() == 1 and not y.is_complex():
        return CATEGORICAL
    told = f"y of {str(y.dtype).removeprefix('torch.')}, shape {tuple(y.shape)}"
    raise ValueError(f"{who}: {told}, may be several things, so say which by likelihood=: bernoulli for rows of yes or"
                     " no, normal for rows of real values, others for (time, event), pixels or tokens")  # fmt: skip
