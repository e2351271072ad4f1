"""Every setting there is, in words: what it is where it is not given, and what it may be."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, get_type_hints

from bcfl.methods import METHODS, option_types
from bcfl.runs.settings import DEFAULT_METHOD, SECTIONS, in_words


@dataclass(frozen=True)
class Setting:
    """One setting, in words."""

    default: str
    allowed: str
    methods: tuple[str, ...] = ()  # of an option: those that have it

    def __str__(self) -> str:
        return "; ".join([self.default, self.allowed, *([", ".join(self.methods)] if self.methods else [])])


def all_settings() -> dict[str, Setting]:
    """All of them by `section.key`, in the order of their sections."""
    found: dict[str, Setting] = {}
    for section, kind in SECTIONS.items():
        if kind is None:
            found |= {f"{section}.{key}": setting for key, setting in _of_methods().items()}
        else:
            hints = get_type_hints(kind)
            for field in dataclasses.fields(kind):
                found[f"{section}.{field.name}"] = Setting(_plain(field.default), in_words(hints[field.name]))
    return found


def _of_methods() -> dict[str, Setting]:
    found = {"name": Setting(_plain(DEFAULT_METHOD), "a method, as `bcfl list methods` has them")}
    for option, hint in option_types().items():
        defaults: dict[str, list[str]] = {}  # default -> the methods that have it
        for name, entry in METHODS.items():
            for field in dataclasses.fields(entry.build):
                if field.name == option:
                    defaults.setdefault(_plain(field.default), []).append(name)
        told = list(defaults)
        if len(told) > 1:
            told = [f"{default} ({', '.join(names)})" for default, names in defaults.items()]
        methods = tuple(name for name in METHODS if any(name in names for names in defaults.values()))
        found[option] = Setting(", ".join(told), in_words(hint), methods)
    return found


def _plain(value: Any) -> str:
    """As it is written in a settings file; "none" stands for nothing."""
    return json.dumps("none" if value is None else value)
