"""Where reports, figures and tables of runs go, and what they do with a folder that cannot be read."""

from pathlib import Path
from typing import Protocol

import pytest

from bcfl.cli import main

pytest.importorskip("matplotlib")


class MakeRun(Protocol):
    def __call__(self, name: str = ..., **options: object) -> Path: ...


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


@pytest.mark.parametrize(
    ("command", "name"), [(["report"], "report.html"), (["figures", "--formats", "svg"], "figures")]
)
def test_what_is_made_of_runs_stands_beside_them(
    command: list[str], name: str, made_up: MakeRun, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = made_up("runs/a/x"), made_up("runs/b", seed=1)
    assert main([*command, "../runs/a/x"]) == 0
    assert (one / name).exists()
    assert not (other.parent / name).exists()
    assert main([*command, "../runs/a/x", str(other)]) == 0
    assert (other.parent / name).exists()  # the innermost folder that holds both
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("command", [["table"], ["report"], ["figures", "--formats", "svg"]])
def test_a_folder_that_cannot_be_read_spoils_no_other(
    command: list[str], made_up: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = made_up("runs/a"), made_up("runs/b", seed=1)
    (bad / "rounds.jsonl").write_text('"nothing"\n')
    assert main([*command, str(good.parent)]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert "left out" in line
    assert str(bad) in line
    assert shown.out
    assert main([*command, str(bad)]) == 2
    assert capsys.readouterr().out == ""
