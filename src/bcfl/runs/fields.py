"""A setting knows itself: its type, its bounds and what it means stand on its dataclass field, as pydantic has them."""

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

STRICT = ConfigDict(strict=True, allow_inf_nan=False)  # true is no number, and 2.0 no whole number
DIGITS = 18  # of a whole number: more than a computer's word holds would fail far from here
LONGEST = 1000  # characters of a text
SHOWN = 100  # characters of a refused value
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): '"none"'}
SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
OUT_OF_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


@dataclass(frozen=True)
class Setting:
    """One setting: what it may be and means, and what it is where it is not given."""

    hint: Any
    default: Any = None

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.hint, config=STRICT)

    @property
    def meaning(self) -> str:
        """What it is for; empty where its field does not say."""
        return next((info.description for info in _infos(self.hint) if info.description), "")

    @property
    def allowed(self) -> str:
        """What it may be."""
        return _in_words(self.hint, bounds=True)

    def check(self, value: Any, key: str) -> Any:
        """`value` as this setting has it; a ValueError that names `key` and says what is allowed otherwise."""
        given, value = value, _plain(value)
        if value == "none" and type(None) in _options(self.hint):  # also where any text will do
            return None
        if _has_long_number(value):
            raise ValueError(f"{key} must be {self.allowed} of at most {DIGITS} digits, got {shown(given)}")
        try:
            found = self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{key} must be {self._wanted(error)}, got {shown(given)}") from None
        if _has_odd_text(found):
            raise ValueError(f"{key} must be one line of at most {LONGEST:,} characters, got {shown(given)}")
        return found

    def _wanted(self, error: ValidationError) -> str:
        """What would have been right, no more of it than the value missed."""
        found = error.errors(include_url=False)
        said = [str(one["ctx"]["error"]) for one in found if one["type"] == "value_error"]
        if said:  # by a check of the field's own
            return said[0]
        outside = any(one["type"] in OUT_OF_BOUNDS for one in found)
        return _in_words(self.hint, bounds=outside, types=not outside)


@cache
def settings_in(kind: type) -> Mapping[str, Setting]:
    """The settings that are a dataclass's fields, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: Setting(hints[field.name], field.default) for field in dataclasses.fields(kind)}


def shown(value: Any) -> str:
    """A value in an error message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes out
        text = "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def named(key: Any) -> str:
    """A name in an error message, as it is if it is short and of one line."""
    text = str(key)
    return text if text.isprintable() and len(text) <= SHOWN else shown(text)


def _plain(value: Any) -> Any:
    """Plain numbers in place of numpy's, and tuples in place of lists, as settings are kept."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _has_long_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_long_number, value))
    return isinstance(value, int) and abs(value) >= 10**DIGITS


def _has_odd_text(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_odd_text, value))
    return isinstance(value, str) and (len(value) > LONGEST or not value.isprintable())


def _infos(hint: Any) -> Iterator[FieldInfo]:
    if get_origin(hint) is Annotated:
        yield from (part for part in get_args(hint)[1:] if isinstance(part, FieldInfo))


def _options(hint: Any) -> Iterator[Any]:
    """The kinds of value that a hint allows, each with its own bounds still on it."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(bare) in (Union, types.UnionType):
        for option in get_args(bare):
            yield from _options(option)
    else:
        yield hint if _bounds(hint) else bare


def _in_words(hint: Any, bounds: bool, types: bool = True) -> str:
    """What is allowed, with its bounds or without; of what is bounded `types` may go without saying."""
    described = []
    for option in _options(hint):
        limits, bare = _bounds(option), get_args(option)[0] if get_origin(option) is Annotated else option
        if get_origin(bare) is Literal:
            described.append(" or ".join(f'"{choice}"' for choice in get_args(bare)))
        elif get_origin(bare) is tuple:
            described.append(f"a list of {_several(get_args(bare))}")
        elif limits and bounds:
            described.append(f"{WORDS[bare]} {limits}" if types else limits)
        else:
            described.append(WORDS[bare])
    return " or ".join(described)


def _several(kinds: tuple[Any, ...]) -> str:
    """What a list holds that is of these types: `int, ...` or `int, int`."""
    kind, count = kinds[0], "" if kinds[-1] is Ellipsis else f"{len(kinds)} "
    return count + (SEVERAL[kind] if kind in SEVERAL else f"lists of {_several(get_args(kind))}")


def _bounds(hint: Any) -> str:
    """A number's bounds: "> 0", "≥ 1 and ≤ 1,000" or, within 0 and 1, "in [0, 1)"; empty where there are none."""
    limit = {name: getattr(part, name) for info in _infos(hint) for part in info.metadata
             for name in SIGNS if getattr(part, name, None) is not None}  # fmt: skip
    low, high = limit.get("gt", limit.get("ge")), limit.get("lt", limit.get("le"))
    if low is not None and high is not None and high <= 1:
        return f"in {'(' if 'gt' in limit else '['}{low:g}, {high:g}{')' if 'lt' in limit else ']'}"
    return " and ".join(
        f"{SIGNS[name]} {f'{value:,}' if isinstance(value, int) else f'{value:g}'}" for name, value in limit.items()
    )
