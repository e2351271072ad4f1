"""Every setting there is, in words: what it means, what it is where it is not given, and what it may be.

`python -m bcfl.runs.reference docs/settings.md` writes the page's tables anew.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcfl.methods import METHODS, all_options, owners_of
from bcfl.runs.fields import Setting, settings_in
from bcfl.runs.sections import SECTIONS
from bcfl.runs.settings import DEFAULT_METHOD

TABLE = re.compile(r"(<!-- (\w+): written by bcfl.runs.reference -->\n)(?:\n(?:\|.*\n)+)?")
HEAD = "\n| setting | default | what it is | what it may be |\n|---|---|---|---|\n"


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
    return {
        f"{section}.{key}": described
        for section, kind in SECTIONS.items()
        for key, described in (_of_methods() if kind is None else described_in(kind)).items()
    }


def described_in(kind: type) -> dict[str, Described]:
    """The settings that are a dataclass's fields, in words."""
    return {key: _described(one) for key, one in settings_in(kind).items()}


def with_tables(page: str, settings: Mapping[str, Described]) -> str:
    """The page with a table of the settings of each section below the line that asks for it."""

    def table(match: re.Match[str]) -> str:
        rows = [
            f"| `{key}` | {_cell(one.default)} | {one.meaning}{_owners(one)} | {one.allowed} |\n"
            for key, one in settings.items()
            if key.startswith(f"{match[2]}.")
        ]
        return "".join([match[1], HEAD, *rows])

    return TABLE.sub(table, page)


def _cell(default: str) -> str:
    return f"`{default}`" if default else ""


def _owners(one: Described) -> str:
    return f" ({', '.join(one.methods)})" if one.methods else ""


def _described(setting: Setting) -> Described:
    default = "" if setting.default is dataclasses.MISSING else _plain(setting.default)
    return Described(setting.meaning, default, setting.allowed)


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
        names = tuple(entry.name for entry in owners)
        found[option] = dataclasses.replace(
            _described(settings[0]), default=", ".join(told if len(told) > 1 else defaults), methods=names
        )
    return found


def _plain(value: Any) -> str:
    """As it is written in a settings file; "none" stands for nothing."""
    return json.dumps("none" if value is None else value)


if __name__ == "__main__":
    from importlib import import_module

    terms = described_in(import_module("bcfl.engines.flower").Terms)  # late and apart: it needs Flower
    every = all_settings() | {f"deploy.{key}": one for key, one in terms.items()}
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text(), every))
