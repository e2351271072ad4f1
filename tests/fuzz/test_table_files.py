"""Mutated tables: a .csv or .parquet file, or a run's table.json, is refused in one line, or gives sound examples.

`make fuzz` tries many more of them: BCFL_FUZZ is how many of all kinds.
"""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_data_files import mutated
from test_run_folders import changed_json

import bcfl
from bcfl.data.tables import Form

pytest.importorskip("narwhals")
pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

pytestmark = pytest.mark.fuzz
COUNT = int(os.environ.get("BCFL_FUZZ", "120"))
SECONDS = 20  # longer than this is a hang
LINE = 2000  # characters
Draw = random.Random


def frame() -> Any:
    draws = np.random.default_rng(0)
    return pd.DataFrame({
        "site": np.repeat(["north", "south", "east"], 12),
        "age": draws.integers(20, 80, 36),
        "dose": draws.normal(size=36).round(3),
        "smoker": draws.random(36) < 0.4,
        "ward": draws.choice(["a", "b", "c"], 36),
        "died": draws.choice(["yes", "no"], 36),
    })  # fmt: skip


def of_table(path: Path) -> Iterator[Any]:
    for client in bcfl.table(path, site="site", target="died").values():
        yield from client.values()


def of_form(path: Path) -> Iterator[Any]:
    yield from Form.read(path).examples(frame())


def write_form(path: Path) -> None:
    path.write_text(json.dumps(bcfl.table(frame(), site="site", target="died").form.as_dict()))


KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Iterator[Any]], Callable[[bytes, Draw], bytes]]] = {
    "table.csv": (lambda path: frame().to_csv(path, index=False), of_table, mutated),
    "table.parquet": (lambda path: frame().to_parquet(path, index=False), of_table, mutated),
    "form.json": (write_form, of_form, lambda content, draw: draw.choice([mutated, changed_json])(content, draw)),
}


@pytest.fixture
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AssertionError(f"took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("alarm")
@pytest.mark.filterwarnings("ignore")  # of the libraries that read the files
def test_a_mutated_table_is_refused_in_one_line_or_gives_sound_examples(name: str, tmp_path: Path) -> None:
    write, examples, mutate = KINDS[name]
    path, draw, counts = tmp_path / name, Draw(name), Counter[str]()
    write(path)
    sound = path.read_bytes()
    for number in range(COUNT // len(KINDS)):
        path.write_bytes(mutate(sound, draw))
        signal.alarm(SECONDS)
        try:
            values = list(examples(path))
        except ValueError as refusal:
            in_a_line = 0 < len(str(refusal)) < LINE and str(refusal).isprintable()
            counts["refused" if in_a_line else f"{number}: {refusal!r}"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{name} {number}: {path.read_bytes()[:2000]!r}") from error
        assert all(bool(torch.isfinite(one.double()).all()) for one in values), number
        counts["sound"] += 1
    print(json.dumps({"table": name, **counts}))
    assert counts.keys() == {"refused", "sound"}
