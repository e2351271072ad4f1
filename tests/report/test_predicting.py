"""Files that `bcfl associate --data` is given: what cannot be read is told in one line. And how tables are printed."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcfl.cli import main
from bcfl.report.predicting import _read_examples


def examples_file(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def test_damaged_files_are_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    path = examples_file(tmp_path / "mine.npz", x=random.random((6, 2)), y=np.arange(6))
    whole = path.read_bytes()
    complaints = set()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            _read_examples(path, None)  # dates, say, may be damaged without harm
        except ValueError as error:  # and nothing else
            complaints.add(str(error))
    assert any("decompressing" in text for text in complaints)
    assert all(text.startswith(f"--data {path} ") for text in complaints)


def test_a_damaged_header_of_an_array_is_refused(tmp_path: Path) -> None:
    path, array = tmp_path / "mine.npz", io.BytesIO()
    np.save(array, np.zeros(3))
    with zipfile.ZipFile(path, "w") as archive:  # whose own checksum finds nothing wrong
        archive.writestr("x.npy", array.getvalue().replace(b"}", b" "))
    with pytest.raises(ValueError, match=r"cannot be read as an \.npz file of plain arrays"):
        _read_examples(path, None)


def test_a_member_that_is_no_array_is_refused(tmp_path: Path) -> None:
    path = examples_file(tmp_path / "mine.npz", y=np.arange(3))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x", "three examples")
    with pytest.raises(ValueError, match="x must have one row for each example"):
        _read_examples(path, None)


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
