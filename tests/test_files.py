"""Files that are whole or absent, whatever happens while they are written, and files that grow while they are read."""

import errno
import json
import os
from pathlib import Path

import predictive
import pytest

from bcfl.files import GrowingLog, replacing, write_atomically


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("broken", ["fsync", "replace", "write"])
@pytest.mark.parametrize("existed", [True, False])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, existed: bool
) -> None:
    path = tmp_path / "a.json"
    if existed:
        write_atomically(path, b"before")

    content = b"after"
    if broken == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif broken == "replace":
        monkeypatch.setattr(os, "replace", fail)
        monkeypatch.setattr(Path, "replace", fail)
    else:
        content = 3  # type: ignore[assignment]  # not bytes: the write itself fails
    with pytest.raises((OSError, TypeError)):
        write_atomically(path, content)
    assert [item.name for item in tmp_path.iterdir()] == (["a.json"] if existed else [])
    assert not existed or path.read_bytes() == b"before"


@pytest.mark.parametrize("broken", ["write", "fsync", "replace", "open"])
def test_a_write_that_fails_names_the_file_that_was_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "a.json"
    if broken == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif broken == "replace":
        path.mkdir()
    elif broken == "open":
        path = tmp_path / "nowhere" / "a.json"
    with pytest.raises(OSError, match=rf"\[Errno \d+\] [A-Z][a-z ]+: '{path}'$") as caught, replacing(path) as file:
        fail() if broken == "write" else file.write(b"after")
    assert caught.value.errno in (errno.ENOSPC, errno.EISDIR, errno.ENOENT)


def test_an_error_about_another_file_stays_about_that(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'other'$"), replacing(tmp_path / "a.json"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "other")


def test_what_several_processes_write_at_once_is_always_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with replacing(path, shared=True) as one, replacing(path, shared=True) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"
    assert [item.name for item in tmp_path.iterdir()] == ["a.npz"]


def test_what_a_script_has_measured_is_not_lost_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(run: Path) -> list[dict[str, str]]:
        if run.name == "second":
            monkeypatch.setattr(os, "fsync", fail)
        return [{"run": run.name}]

    out = tmp_path / "out.json"
    monkeypatch.setattr(predictive, "measure", measure)
    monkeypatch.setattr(predictive, "runs_and_file", lambda _: ([Path("first"), Path("second")], out))
    with pytest.raises(OSError, match="No space"):
        predictive.main()
    assert json.loads(out.read_text()) == [{"run": "first"}]


def test_a_growing_log_is_read_once_and_line_by_line(tmp_path: Path) -> None:
    path, read = tmp_path / "log", []

    def note(line: bytes) -> int:
        read.append(line)
        return int(line)

    log = GrowingLog(path, note)
    assert log.records() == []
    for text, known in [("1", []), ("0\n2", [10]), ("", [10]), ("0\n", [10, 20]), ("30\n40\n5", [10, 20, 30, 40])]:
        with path.open("a") as file:
            file.write(text)
        assert log.records() == known
    assert read == [b"10", b"20", b"30", b"40"]
    path.unlink()
    assert log.records() == []


@pytest.mark.parametrize("later", ["10\n", "10\n21\n", "10\n2100\n31\n41\n", "10\n2100\n"])
def test_a_log_that_was_cut_back_is_read_anew(tmp_path: Path, later: str) -> None:
    path = tmp_path / "log"
    path.write_text("10\n20\n30\n")
    log = GrowingLog(path, int)
    assert log.records() == [10, 20, 30]
    path.write_text(later)
    assert log.records() == [int(line) for line in later.split("\n")[:-1]]


def test_a_log_that_has_not_grown_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_text("10\n2")
    log = GrowingLog(path, int)
    log.records()
    monkeypatch.setattr(Path, "open", fail)
    assert log.records() == [10]
