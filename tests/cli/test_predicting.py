"""Files that `bcfl associate --data` is given: what cannot be read is told in one line. And how tables are printed."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcfl.cli import main


def examples_file(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("options", [[], ["--examples", "1"]], ids=["all", "some"])
def test_a_single_value_is_no_list_of_examples(
    real_run: Path, tmp_path: Path, name: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arrays: dict[str, Any] = {"x": np.zeros((2, 1, 8, 8)), "y": np.arange(2), name: np.array(1)}
    path = examples_file(tmp_path / "mine.npz", **arrays)
    assert main(["associate", str(real_run), "--data", str(path), *options]) == 2
    told = capsys.readouterr().err
    assert told == f"bcfl: --data {path}: {name} must have one row for each example, but is a single value\n"


def test_a_table_is_not_folded_where_there_is_no_terminal(
    real_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["evaluate", str(real_run)]) == 0
    shares = [f"accuracy on the surest {share}%" for share in (50, 80, 90)]
    assert any(all(title in line for title in shares) for line in capsys.readouterr().out.splitlines())


def newcomers_file(path: Path) -> Path:
    return examples_file(path, x=np.zeros((2, 1, 8, 8)), y=np.arange(2))


@pytest.mark.parametrize(("command", "option"), [("evaluate", "--out"), ("associate", "--save"), ("report", "--out")])
def test_a_folder_in_the_place_of_a_file_is_told_before_any_work(
    real_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: str,
) -> None:
    for work in ("bcfl.runs.loop.load_result", "bcfl.report.reading.read_runs"):
        monkeypatch.setattr(work, lambda *_: pytest.fail("work was done"))
    data = ["--data", str(newcomers_file(tmp_path / "mine.npz"))] if command == "associate" else []
    assert main([command, str(real_run), *data, option, str(tmp_path)]) == 2
    assert f"{option} {tmp_path} is a folder, give a file" in capsys.readouterr().err


@pytest.mark.parametrize("json_wanted", [False, True])
@pytest.mark.parametrize(("command", "option"), [("evaluate", "--out"), ("associate", "--save")])
def test_what_was_found_is_printed_even_if_it_cannot_be_written(
    real_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: str,
    json_wanted: bool,
) -> None:
    data = ["--data", str(newcomers_file(tmp_path / "mine.npz"))] if command == "associate" else []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / "out"
    assert main([command, str(real_run), *data, option, str(out), *(["--json"] if json_wanted else [])]) == 2
    told = capsys.readouterr()
    assert told.err == f"bcfl: [Errno {errno.ENOSPC}] No space left on device: '{out}'\n"
    assert ("nll" in json.loads(told.out) or "point" in json.loads(told.out)) if json_wanted else "NLL" in told.out
    assert "is in" not in told.out
    assert not out.exists()
