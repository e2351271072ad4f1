"""Mutated settings: each file is refused in one line, or it says what the run then has, to the last value.

They go the way that `bcfl run` takes them: a file, overrides, the method for so many clients. `make fuzz` tries many
more: BCFL_FUZZ is how many of each kind.
"""

import json
import os
import random
import signal
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bcfl.methods import METHODS, all_options
from bcfl.runs.fields import settings_in
from bcfl.runs.problem import method_for
from bcfl.runs.sections import SECTIONS
from bcfl.runs.settings import Config, kept_config, load_config, parse_config

pytestmark = pytest.mark.fuzz
COUNT = int(os.environ.get("BCFL_FUZZ", "200"))
SECONDS = 20  # longer than this is a hang
LINE = 2000  # characters: the longest refusals quote a value and tell all methods, or all options
Draw = random.Random
Values = dict[str, dict[str, Any]]

NAMES = [*(name.replace("-M", "-3") for name in METHODS), "bcfl-g-w", "bcfl-mh-6-w"]
NUMBERS = [0, 1, -1, 2, 3, 20, 10**18, 10**30, 2**63, 0.1, 0.5, 1.0, 1.5, -0.0, 1e-9, 1e-320, 1e30, 1e308]
TEXTS = ["", "none", "auto", "learn", "a:b", "a:<lambda>", "../..", "feature(4,2)", "feature( 4, 2 )", "label(1,2,nan)"]
TEXTS += ["digits", "cifar10", "file", "per_example", "exact", "sigma", "median", "ä\u2028", "x" * 5000, "inf"]
LISTS: list[Any] = [[], [0], [0, 90], [[1, 2]], [[1, 2], [1, 3]], [1, 9], ["mnist"], [[[]]], [True], [1e308]]
ODD: list[Any] = [True, False, {}, {"a": {"b": 1}}, float("inf"), float("nan")]


def valid(draw: Draw) -> Values:
    """Settings that are sound, some of them given and most left out."""
    name = draw.choice(NAMES)
    values: Values = parse_config({"method": {"name": name}}).as_dict()
    kept = {
        section: {key: value for key, value in keys.items() if value is not None and draw.random() < 0.3}
        for section, keys in values.items()
    }
    kept["method"]["name"] = name
    return kept


def value(draw: Draw) -> Any:
    return draw.choice([*NUMBERS, *TEXTS, *LISTS, *ODD])


def another_value(values: Values, draw: Draw) -> None:
    section = draw.choice(list(SECTIONS))
    kind = SECTIONS[section]
    keys = ["plugin", *all_options()] if kind is None else list(settings_in(kind))
    values[section][draw.choice(keys)] = value(draw)


def another_method(values: Values, draw: Draw) -> None:
    values["method"]["name"] = draw.choice([*NAMES, *TEXTS, "bcfl-mh-0", "bcfl-c-99999999", "fedproxy", "bcfl-mh-M"])


def options_of_another(values: Values, draw: Draw) -> None:
    values["method"] |= parse_config({"method": {"name": draw.choice(NAMES)}}).method | {"name": draw.choice(NAMES)}


def a_slip_of_the_pen(values: Values, draw: Draw) -> None:
    section = values[draw.choice([name for name, keys in values.items() if keys])]
    key = draw.choice(list(section))
    at = draw.randrange(len(key) + 1)
    section[key[:at] + draw.choice(["", "x", "_", "é"]) + key[at + 1 :]] = section.pop(key)


def another_section(values: Values, draw: Draw) -> None:
    values[draw.choice(["sweep", "deploy", "date", "", *SECTIONS])] = draw.choice([{}, value(draw), {"seeds": [1]}])


CHANGES: list[Callable[[Values, Draw], None]] = [
    *[another_value] * 5, another_method, options_of_another, a_slip_of_the_pen, another_section,
]  # fmt: skip


def toml_of(something: Any) -> str:
    if isinstance(something, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(kept)}" for key, kept in something.items()) + "}"
    if isinstance(something, list | tuple):
        return "[" + ", ".join(map(toml_of, something)) + "]"
    return str(something) if isinstance(something, float) else json.dumps(something)


def written(values: dict[str, Any]) -> str:
    """As TOML, what is no section first: below a section it would be a key of it."""
    lines = [f"{json.dumps(name)} = {toml_of(kept)}" for name, kept in values.items() if not isinstance(kept, dict)]
    for name, section in values.items():
        if isinstance(section, dict):
            lines += [
                f"[{json.dumps(name)}]",
                *(f"{json.dumps(key)} = {toml_of(kept)}" for key, kept in section.items()),
            ]
    return "\n".join(lines)


def torn(content: bytes, draw: Draw) -> bytes:
    """The file with some of its bytes changed, left out or doubled."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, length = draw.randrange(len(content) + 1), draw.choice([0, 0, 1, 1, 8])
        put = draw.choice(
            [
                b"",
                b" ",
                b"7",
                b"7",
                b"\n",
                b"[",
                b"]",
                b'"',
                b"=",
                b"\n",
                b"0",
                b"9" * 5000,
                b"[" * 2000,
                b"\xff",
                content[:40],
            ]
        )
        content = content[:at] + put + content[at + length :]
    return content


def normal(kept: Any) -> Any:
    """A value as settings have it: "none" is None, lists and tuples are alike, and a partition has no spaces."""
    if isinstance(kept, list | tuple):
        return [normal(part) for part in kept]
    return None if kept == "none" else "".join(kept.split()) if isinstance(kept, str) else kept


def assert_kept(config: Config, given: Values) -> None:
    """What was given is what the run has, and what the run writes down is the run."""
    has = config.all_settings()
    for section, keys in given.items():
        for key, wanted in keys.items():
            found = has[section].get(key)
            filled = normal(wanted) is None or (section, key, wanted) == ("model", "name", "auto")
            assert filled or normal(found) == normal(wanted) or found == wanted, (section, key, wanted, found)
    again = kept_config(json.loads(json.dumps(config.as_dict())))
    assert (again, again.identity()) == (config, config.identity())


@pytest.fixture
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AssertionError(f"took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def outcome(path: Path, overrides: list[str], given: Callable[[], Values]) -> str:
    """What became of these settings; anything but acceptance as given or one line of refusal is an error."""
    signal.alarm(SECONDS)
    try:
        config = load_config(path, overrides)
    except ValueError as refusal:
        in_a_line = 0 < len(str(refusal)) < LINE and str(refusal).isprintable()
        return "refused" if in_a_line else f"refused without a word, or with a book: {refusal}"
    assert_kept(config, given())
    try:
        method_for(config, 8)
    except ValueError as refusal:
        return "does not suit 8 clients" if str(refusal).isprintable() else f"refused in several lines: {refusal}"
    return "accepted"


@pytest.mark.parametrize("kind", ["file", "overrides", "bytes"])
@pytest.mark.usefixtures("alarm")
def test_settings_are_kept_as_given_or_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    path, counts = tmp_path / "settings.toml", Counter[str]()
    for number in range(COUNT):
        draw = Draw(f"{kind}-{number}")
        values, overrides = valid(draw), list[str]()
        if kind == "overrides":
            key = draw.choice([f"{name}.{key}" for name, keys in values.items() for key in keys] or ["model.name"])
            key = draw.choice([key, key, key, key.replace(".", ""), key[1:], f"{key}.x", "rounds"])
            overrides = [
                draw.choice(["", " "]).join(
                    [key, "=", draw.choice([toml_of(value(draw)), "[" * 3000, "a'", "7", "0.5"])]
                )
            ]
        for _ in range(draw.randint(0, 2) if kind != "overrides" else 0):
            with_change: Any = draw.choice(CHANGES)
            with_change(values, draw) if all(isinstance(v, dict) for v in values.values()) else None
        content = written(values).encode()
        path.write_bytes(torn(content, draw) if kind == "bytes" else content)

        def given(overrides: list[str] = overrides) -> Values:
            read: Values = tomllib.loads(path.read_text())
            for override in overrides:
                key, _, text = override.partition("=")
                section, _, name = key.strip().partition(".")
                try:
                    read.setdefault(section, {})[name] = tomllib.loads(f"x = {text}")["x"]
                except (ValueError, RecursionError):
                    read.setdefault(section, {})[name] = text.strip()
            return read

        try:
            counts[outcome(path, overrides, given)] += 1
        except Exception as error:
            raise AssertionError(f"{kind} {number}: {overrides} {path.read_bytes()[:2000]!r}") from error
    print(kind, dict(counts))
    assert counts["accepted"] > 0
    assert counts["refused"] > 0
    assert counts.keys() <= {"accepted", "refused", "does not suit 8 clients"}
