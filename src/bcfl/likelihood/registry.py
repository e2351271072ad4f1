"""Likelihoods by name, by a setting's text, and by what y looks like."""

import dataclasses
import difflib
import re
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from bcfl.likelihood.classes import Bernoulli, Categorical, Ordinal
from bcfl.likelihood.contract import Family, Likelihood
from bcfl.likelihood.counts import NegativeBinomial, Poisson
from bcfl.likelihood.fields import Pixels, Tokens
from bcfl.likelihood.real import Normal, Quantile, StudentT
from bcfl.likelihood.times import Hazard, LogNormal, Weibull

FAMILIES: dict[str, type[Any]] = {
    family.name: family
    for family in (
        *(Categorical, Bernoulli, Ordinal, Normal, StudentT, Quantile, Poisson, NegativeBinomial),
        *(Weibull, LogNormal, Hazard, Pixels, Tokens),
    )
}
ALIASES = {"censored": "weibull"}
CATEGORICAL = Likelihood(Categorical())
AUTO = "auto"  # as a setting: by what y looks like
LONGEST = 500  # characters of a setting: the edges of many spans are among them
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
COUNTS, MOST = ("values", "labels", "num_classes"), 1_000_000
POSITIVE = ("unit", "class_weight", "edges")
OF_ALL = ("extras", "per")
OF_SEVERAL = ("extras", "class_weight", "levels", "edges")  # options that are rows: written a+b+c


def of(name: str, **options: Any) -> Likelihood:
    """The likelihood of that name with these options: the family's own, and `extras` and `per`."""
    name = ALIASES.get(name, name)
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
    of_family = {key: _checked(name, key, value) for key, value in options.items() if key not in OF_ALL}
    family: Family = FAMILIES[name](**of_family)
    return Likelihood(family, **further)


def _checked(name: str, option: str, value: Any) -> Any:
    """The option's value, of the type that its family says, and a number that its meaning allows."""
    value = tuple(value) if isinstance(value, list) else value
    hint = get_type_hints(FAMILIES[name])[option]
    try:
        found = TypeAdapter(hint, config=STRICT).validate_python(value)
    except ValidationError:
        wanted = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)
        raise ValueError(f"likelihood {name}: {option} must be of {wanted} and finite, got {value!r}") from None
    if option in COUNTS and found is not None and not 1 <= found <= MOST:
        raise ValueError(f"likelihood {name}: {option} must be from 1 to {MOST:,}, got {found}")
    numbers = found if isinstance(found, tuple) else (found,)
    if option in POSITIVE and found is not None and not all(number > 0 for number in numbers):
        raise ValueError(f"likelihood {name}: {option} must be above 0, got {value!r}")
    return found


def parse(text: str) -> Likelihood:
    """The likelihood of a setting's text: a name, and perhaps options in brackets: "normal(scale=network)"."""
    if len(text) > LONGEST:
        raise ValueError(f"a likelihood is written in at most {LONGEST} characters, got {text[:50]!r}…")
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


def given(text: str) -> Likelihood | None:
    """The likelihood of a setting's text; None of "auto"."""
    return None if text == AUTO else parse(text)


def choose(y: Tensor, who: str = "y") -> Likelihood:
    """The likelihood that suits these targets beyond doubt: whole numbers are classes, real ones normal."""
    if y.dim() == 1 and y.is_floating_point() and bool((y != y.round()).any()):
        return Likelihood(Normal())
    if y.dim() == 1 and not y.is_complex() and not (y.is_floating_point() and len(y)):
        return CATEGORICAL
    told = f"y of {str(y.dtype).removeprefix('torch.')}, shape {tuple(y.shape)}"
    raise ValueError(f"{who}: {told}, may be several things, so say which by likelihood=: bernoulli for rows of "
                     "yes-or-no labels, normal for real values, poisson for counts, categorical for classes that are "
                     "written as real numbers, others for (time, event), pixels or tokens")  # fmt: skip
