"""Run folders that no run has written: each is refused in one line, or all that is shown of it is sound.

BCFL_FUZZ sets how many are tried (`make fuzz`).
"""

import json
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import write_eventful_run, write_run

from bcfl.report.page import report
from bcfl.report.reading import Run, group_runs, read_run
from bcfl.report.tables import FORMATS
from bcfl.runs.loop import load_result, resume
from bcfl.runs.observers import Observer

pytestmark = pytest.mark.fuzz
COUNT = int(os.environ.get("BCFL_FUZZ", "120"))
LONGEST = 60  # seconds for one folder: far above what any takes
TAG = "<img src=x onerror=alert(1)>"
HOSTILE = f"</script><!--<script>{TAG}"
WILD: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, -0.5, 1e308, -1e308, 10**30, -(10**18), float("nan"), float("inf"),
    -float("inf"), "", "0", "nan", HOSTILE, "\x1b[2J", "é\u2028\0", [], {}, [[]], [0], [None], {"a": 1}, [HOSTILE],
]  # fmt: skip


class Begun(Exception):  # noqa: N818
    """Training would begin: that is where a mutated run ends."""


class _Stop(Observer):
    def started(self, *_: Any) -> None:
        raise Begun

    def round_done(self, *_: Any) -> None: ...


def places_in(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a JSON value."""
    if above:
        yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places_in(one, (*above, key))


def change_value(value: Any, chance: random.Random) -> None:
    """Something in it, at any depth, is replaced, taken away, doubled or added to."""
    if not (places := list(places_in(value))):
        return
    *above, key = chance.choice(places)
    holder = value
    for step in above:
        holder = holder[step]
    kind = chance.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == 2 and isinstance(holder, dict):
        holder[HOSTILE] = holder.pop(key)
    elif kind == 3 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * chance.choice((-1, 10, 1e9, 0.1)) + chance.choice((0, 1, -1))
    else:
        holder[key] = chance.choice(WILD)


def changed_json(content: bytes, chance: random.Random) -> bytes:
    value = json.loads(content)
    change_value(value, chance)
    return json.dumps(value).encode()


def changed_bytes(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    return chance.choice((
        content[:at],
        content[:at] + bytes(chance.randrange(256) for _ in range(3)) + content[at + 2 :],
        content[:at] + b"[" * 10**5 + content[at:],
        content[:at] + b"9" * 5000 + content[at:],
        content.decode(errors="replace").encode("utf-16"),
        b"\xef\xbb\xbf" + content,
        content * 2,
        b"",
    ))  # fmt: skip


def mutated(content: bytes, name: str, chance: random.Random) -> bytes:
    if name.endswith(".safetensors") or chance.random() < 0.25:
        return changed_bytes(content, chance)
    if not name.endswith(".jsonl"):
        return changed_json(content, chance)
    lines = content.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    kind = chance.randrange(8)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, chance.choice(lines))
    else:
        lines[at] = changed_json(lines[at], chance) + b"\n"
    return b"".join(lines)


def assert_sound(run: Run) -> None:
    """What figures and tables take for granted, said once more in other words than the reader's."""
    clients = run.num_clients
    for record in run.rounds:
        shares = [record.get(key) for key in ("accuracy", "macro_f1")] + list(record.get("client_accuracy") or [])
        assert all(share is None or (not isinstance(share, bool) and 0 <= share <= 1) for share in shares)
        assert all(np.isfinite(float(record[key])) for key in ("nll", "ece", "ari") if record.get(key) is not None)
        assert min(record["work"].values(), default=0) >= 0
    for one in run.associations:
        assert one.assignment.shape == (len(one.weight), clients)
        assert one.parent.shape == one.weight.shape
        assert one.assignment.dtype == one.parent.dtype == np.int64
        assert abs(one.weight.sum() - 1) < 0.01
    assert run.group is None or run.group.shape == (clients,)
    assert run.train_labels is None or len(run.train_labels) == clients
    assert [record["round"] for record in run.rounds] == list(range(1, len(run.rounds) + 1))
    assert not run.complete or len(run.rounds) == run.config["experiment"]["rounds"]


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise AssertionError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def look_at(path: Path, chance: random.Random) -> None:
    """All that shows a run; figures, which are slow, now and then."""
    run = read_run(path)
    assert_sound(run)
    page = report([run])
    assert TAG not in page
    for form in FORMATS.values():
        assert "\x1b" not in form(group_runs([run]))
    if chance.random() < 0.01 and run.rounds:
        from bcfl.report.paper import save_figures

        save_figures([run], path / "figures", ["svg"])


def load(path: Path, _: random.Random) -> None:
    result = load_result(path)
    assert result.assignment.shape == (json.loads((path / "manifest.json").read_text())["num_clients"],)
    assert (result.probability.sum(1) - 1).abs().max() < 1e-6


def go_on(path: Path, _: random.Random) -> None:
    try:
        resume(path, num_workers=1, observers=[_Stop()])
    except Begun:
        return


def outcome_of(use: Callable[[Path, random.Random], None], path: Path, chance: random.Random) -> str:
    try:
        with no_longer_than(LONGEST):
            use(path, chance)
    except ValueError as error:
        told = str(error)
        named = use is not look_at or str(path) in told
        return "refused" if "\n" not in told and named else f"refused without its place, or in several lines: {told}"
    except Exception as error:
        return f"{type(error).__name__}: {error} at {traceback.extract_tb(error.__traceback__)[-1]}"
    return "sound"


def test_a_changed_folder_is_refused_in_a_line_or_soundly_shown(
    real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "bcfl")
    sources = [
        real_run,
        write_run(tmp_path / "sources" / "made-up"),
        write_run(tmp_path / "sources" / "one-model", method="fedavg", hypotheses=1, clusters=1, complete=False),
        write_eventful_run(tmp_path / "sources" / "eventful"),
    ]
    outcomes: Counter[str] = Counter()
    wrong = []
    for number in range(COUNT):
        chance = random.Random(number)
        source = chance.choice(sources)
        path = shutil.copytree(source, tmp_path / "changed")
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "lock")
        for file in chance.sample(files, chance.choice((1, 1, 1, 2))):
            content = mutated(file.read_bytes(), file.name, chance)
            file.unlink() if chance.random() < 0.02 else file.write_bytes(content)
        for use in (look_at, load, go_on) if source is real_run else (look_at,):
            outcome = outcome_of(use, path, chance)
            if outcome in ("sound", "refused"):
                outcomes[f"{use.__name__}: {outcome}"] += 1
            else:
                wrong.append(f"folder {number}, {use.__name__}: {outcome}")
        shutil.rmtree(path)
    with capsys.disabled():
        print(f"\n{COUNT} changed run folders: {dict(sorted(outcomes.items()))}, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong[:20])
    assert len(outcomes) == 6  # each use has met both
