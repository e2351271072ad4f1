"""Every setting there is, in words: what it means, what it is where it is not given, and what it may be."""

import json
from dataclasses import dataclass
from typing import Any

from bcfl.methods import METHODS, all_options, owners_of
from bcfl.runs.fields import Setting, settings_in
from bcfl.runs.sections import SECTIONS
from bcfl.runs.settings import DEFAULT_METHOD


@dataclass(frozen=True)
class Described:
    """One setting, in words."""

    meaning: str
    default: str
    allowed: str
    methods: tuple[str, ...] = ()  # of an option: those that have it

    def __str__(self) -> str:
        told = [self.meaning, f"default {self.default}", self.allowed]
        return "; ".join([*told, f"of {', '.join(self.methods)}"] if self.methods else told)


def all_settings() -> dict[str, Described]:
    """All of them by `section.key`, in the order of their sections."""
    found: dict[str, Described] = {}
    for section, kind in SECTIONS.items():
        known = _of_methods() if kind is None else {key: _described(one) for key, one in settings_in(kind).items()}
        found |= {f"{section}.{key}": described for key, described in known.items()}
    return found


def _described(setting: Setting) -> Described:
    return Described(setting.meaning, _plain(setting.default), setting.allowed)


def _of_methods() -> dict[str, Described]:
    found = {
        "name": Described("who is put with whom, and how models are made", _plain(DEFAULT_METHOD), ", ".join(METHODS)),
        "plugin": Described("the module that brings a method of your own", _plain(None), 'a text or "none"'),
    }
    for option in all_options():
        owners = owners_of(option)
        settings = [settings_in(entry.build)[option] for entry in owners]
        defaults: dict[str, list[str]] = {}  # default -> the methods that have it
        for entry, setting in zip(owners, settings, strict=True):
            defaults.setdefault(_plain(setting.default), []).append(entry.name)
        told = [f"{default} ({', '.join(names)})" for default, names in defaults.items()]
        found[option] = Described(
            settings[0].meaning,
            ", ".join(told if len(told) > 1 else defaults),
            settings[0].allowed,
            tuple(entry.name for entry in owners),
        )
    return found


def _plain(value: Any) -> str:
    """As it is written in a settings file; "none" stands for nothing."""
    return json.dumps("none" if value is None else value)
