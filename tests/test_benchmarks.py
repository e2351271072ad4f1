"""The benchmark suite runs, at its smallest: what it measures here means nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bcfl.client.trainer import Training

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results.json"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def tiny(**changes: Any) -> Any:
    from workloads import TINY

    return replace(TINY, **{"num_clients": 4, "num_groups": 2, "num_examples": 8} | changes)


def test_rounds_are_measured_beside_a_bare_loop_and_each_other() -> None:
    import rounds

    rows = [
        *rounds.engine(tiny(), [rounds.visit(tiny(), repeats=1), rounds.visit(tiny(), repeats=1)], 1.1),
        *rounds.methods(tiny(), [rounds.visit_methods(tiny(), num_rounds=1, scoring=8, repeats=1)] * 2),
        *rounds.many_clients(tiny(), few=2, many=4, repeats=1),
    ]
    assert len({row["name"] for row in rows}) == len(rows) == 8


def test_what_racing_saves_is_measured() -> None:
    import rounds

    rows = rounds.saved_scoring(num_clients=4, num_rounds=1, num_looks=1)
    assert [row["name"].split(",")[0] for row in rows] == ["BCFL-G", "BCFL-C-6", "BCFL-MH-6"]
    assert all(0 < row["value"] <= 1 for row in rows)


def test_growth_is_measured_and_the_worst_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import rounds

    rows = rounds.scaling(tiny(), repeats=1, clients=(2, 4))
    assert [row["name"].split()[2][0] for row in rows] == ["C", "K", "M", "P"]
    assert all(row["value"] > 0 for row in rows)
    monkeypatch.setattr(rounds, "best_seconds", lambda *rounds, repeats: [1.0, 2.0, 12.0][: len(rounds)])
    of_clients, *_ = rounds.scaling(tiny(), repeats=1, clients=(2, 20, 40))
    assert of_clients["value"] == 3  # six times the time for twice the clients
    assert of_clients["verdict"] == "short"


def test_a_figure_is_fine_up_to_its_target() -> None:
    from measure import row

    verdicts = [row("a", value, 1.1, "of b")["verdict"] for value in (1.0, 1.1, 1.11, float("nan"))]
    assert verdicts == ["ok", "ok", "short", "short"]


def test_the_targets_are_those_that_were_set() -> None:
    """A target must not move because a figure missed it."""
    committed = {row["name"]: round(row["target"], 4) for row in json.loads(RESULTS.read_text())["rows"]}
    nets = ("Fashion-MNIST net", "CIFAR-10 net", "Digits-Five net")
    wanted = {f"{name}: a round on two workers": round(1 / 1.8, 4) for name in (*nets, "AmazonReview net")}
    wanted |= {f"{name}: FedAvg round": limit for name, limit in zip(nets, (1.1, 1.1, 1.15), strict=True)}
    wanted |= {"BCFL-G round": 1.9, "BCFL-G round, racing = 0.01": 1.35, "BCFL-C-6 round": 1.25}
    wanted |= {f"{name}, racing = 0.01: scored examples": 0.3333 for name in ("BCFL-G", "BCFL-C-6", "BCFL-MH-6")}
    wanted |= {"BCFL-MH-6, a distinct job": 1.1, "10000 clients: fixed cost of one": 1.0, "bcfl --help": 3}
    wanted |= {"bcfl run, until its first round is done": 5}
    memory = "Digits-Five net, BCFL-MH-6: memory"
    wanted |= {f"{memory} beside the new beliefs": 1, f"{memory} with 80 clients": 1.1}
    assert wanted.items() <= committed.items()


def test_the_bare_loop_takes_the_steps_that_fedavg_takes() -> None:
    """One client, started alike: the yardstick trains the same model on the same batches."""
    import torch
    from workloads import BareLoop, round_of

    from bcfl.methods.averaging import FedAvg

    net = tiny(num_clients=1, training=Training(local_steps=4, momentum_state="fresh"))
    bare = BareLoop(net, 1)
    with net.simulator(1) as simulator:
        _, state = round_of(FedAvg(), simulator, 1)
        start = FedAvg().init(simulator.begin(0)).models.mean[0]
    views = iter(start.split([p.numel() for p in bare._start]))
    bare._start = [next(views).view(p.shape) for p in bare._start]
    bare()
    found = bare._workers.submit(lambda: torch.cat([p.detach().flatten() for p in bare._own.module.parameters()]))
    assert torch.allclose(found.result(), state.models.mean[0], atol=1e-5)
    bare.close()


def test_operators_are_told_apart() -> None:
    import operators
    from workloads import NETS

    net = replace(NETS[1], num_examples=8, training=Training(local_steps=1))
    shares = operators.shares((net,))
    assert list(shares) == ["CIFAR-10 net, training", "CIFAR-10 net, scoring"]
    for of_kind in shares.values():
        assert sum(of_kind.values()) == pytest.approx(1)
        assert of_kind["convolution"] > 0 < of_kind["matrix product"]


@pytest.mark.slow
def test_memory_and_start_up_are_measured() -> None:
    import footprint

    rows = [*footprint.memory(tiny(), (2, 4)), *footprint.start_up(repeats=1)]
    assert len(rows) == 4
    assert all(row["value"] > 0 for row in rows)


def test_the_page_takes_its_tables_from_the_results() -> None:
    import suite
    from measure import row

    record = {"machine": suite.machine(), "rows": [row("a figure", 2.0, 1.5, "yards", "a note")], "shares": {}}
    text = suite.page(suite.PAGE.read_text(), record)
    assert "| a figure | 2.00 | ≤ 1.5 yards | short | a note |" in text
    assert suite.page(text, record) == text
    with pytest.raises(ValueError, match="must hold"):
        suite.page("no marks", record)


def test_the_page_holds_the_committed_results() -> None:
    import suite

    text = suite.PAGE.read_text()
    assert suite.page(text, json.loads(suite.RESULTS.read_text())) == text
