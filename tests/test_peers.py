"""The race beside peers: the same steps are counted, and who cannot run is named and left out."""

import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parent.parent / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


@pytest.mark.slow
def test_ours_and_the_limit_make_the_same_steps_and_others_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    import race

    figures = race.race("cnn", 1, Path("/nowhere/python"))
    assert [one["beside"] for one in figures] == ["limit"]
    assert figures[0]["ratio"] > 0
    said = capsys.readouterr().out
    assert "JAX, vmap: left out, as there is no /nowhere/python" in said
    assert "round 1 of 1" in said
    assert "limit" in race.page(figures)


def test_every_round_has_an_order_of_its_own() -> None:
    import problem

    work = problem.Work(3, 40, (2,))
    first, again, second = work.order(1), work.order(1), work.order(2)
    assert (first == again).all()
    assert (first != second).any()
    assert first.shape == (3, problem.STEPS, problem.BATCH)
    assert sorted(first[0].flatten()[:40].tolist()) == list(range(40))
    sys.modules.pop("problem")
