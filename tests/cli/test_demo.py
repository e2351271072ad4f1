from pathlib import Path

import pytest
from rich.console import Console

from bcfl.cli import main, tour


def test_the_tour_ends_with_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tour, "ROUNDS", 3)  # the way through is the same, only shorter
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--workers", "1"]) == 0
    told = capsys.readouterr().out
    page = tmp_path / "bcfl-demo" / "report.html"
    assert told.index("1  The clients") < told.index("3  Who belongs together?") < told.index(str(page))
    assert "fedavg" in page.read_text()
    assert "bcfl-mh-3" in page.read_text()
    lines = [line for line in told.splitlines() if line.startswith("   round")]
    assert len(lines) == 6  # three rounds of two runs
    digits = lines[-1].split("%")[1].replace("▇", "").split()
    assert [len(block) for block in digits] == [5, 5, 5, 5]


def test_the_tour_does_not_write_over_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("precious")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "already holds something" in capsys.readouterr().err


def test_the_end_of_the_input_counts_as_enter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(*_: object) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    tour._pause(Console(), waits=True)
    assert capsys.readouterr().out.endswith("Enter to go on \n")  # what comes next begins on a line of its own
