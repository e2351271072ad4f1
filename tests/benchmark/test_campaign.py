"""The benchmark as it is run: gone on with after a stop, the same side by side, tuned without a look at test rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcfl.benchmark import campaign, fitting
from bcfl.benchmark.campaign import Campaign, work_off
from bcfl.benchmark.contestants import CONTESTANTS, contestants_named
from bcfl.benchmark.fitting import Setting, chosen, fit, record
from bcfl.benchmark.ledger import Key, kept
from bcfl.benchmark.preparation import federation
from bcfl.benchmark.tasks import all_tasks, tasks_named
from bcfl.cli import main
from bcfl.methods import entry_of

LITTLE = Setting(rounds=2, local_steps=4)
TIMED = ("seconds", "choosing_seconds")


def little(methods: str, tasks: str = "sleepstudy", **more: Any) -> Campaign:
    return Campaign(tasks_named(tasks), contestants_named(methods), ("linear",), setting=LITTLE, **more)


def untimed(records: dict[Key, dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    return {key: {name: value for name, value in one.items() if name not in TIMED} for key, one in records.items()}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    told: list[str] = []
    assert work_off(little("fedavg"), tmp_path, 1) == {}
    first = (tmp_path / "sleepstudy.jsonl").read_bytes()
    assert work_off(little("fedavg,local"), tmp_path, 1, told.append) == {}
    assert (tmp_path / "sleepstudy.jsonl").read_bytes().startswith(first)
    assert told[0] == "1 of 2 are there already"
    assert len(told) == 2


@pytest.mark.slow
def test_side_by_side_gives_the_same_numbers(tmp_path: Path) -> None:
    for jobs in (1, 2):
        assert work_off(little("fedavg,bcfl-g,mixed-model"), tmp_path / str(jobs), jobs) == {}
    assert untimed(kept(tmp_path / "1")) == untimed(kept(tmp_path / "2"))


def test_one_that_fails_is_told_and_in_no_other_s_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, *rest: Any, **more: Any) -> dict[str, Any]:
        if name == CONTESTANTS["fedavg"]:
            raise ValueError("it will not")
        return record(name, *rest, **more)

    monkeypatch.setattr(campaign, "record", failing)
    failed = work_off(little("fedavg,mixed-model"), tmp_path, 1)
    assert failed == {("sleepstudy", "fedavg", "linear", 0, False, False): "ValueError: it will not"}
    assert [key[1] for key in kept(tmp_path)] == ["mixed-model"]


def test_a_record_holds_every_site_s_numbers_and_the_work() -> None:
    data = federation(all_tasks()["planted-answers"]).only(tuple(range(6)))
    found = record(CONTESTANTS["bcfl-g"], "linear", data, LITTLE, tune=False)
    assert found["options"]["num_clusters"] == 3  # two sites in each at least
    assert all(len(found[name]) == 6 for name in ("sites", "rows", "test_rows", "nll", "accuracy"))
    assert found["local_steps"] == found["options"]["rounds"] * 4 * 6
    assert found["bytes_down"] > 0
    assert set(found["membership"]) == {"stated", "right", "nll"}
    assert 0 <= found["calibration"]["ece"] <= 1


def test_kept_losses_are_those_of_the_stated_probabilities() -> None:
    data = federation(all_tasks()["sleepstudy"]).only(tuple(range(5)))
    found = record(CONTESTANTS["fedavg"], "linear", data, LITTLE, tune=False)
    fitted = fit(CONTESTANTS["fedavg"], "linear", data, LITTLE, found["options"])
    assert found["nll"] == pytest.approx(fitted.nll, rel=1e-5)
    assert found["rmse"] == pytest.approx(fitted.measure, rel=1e-5)


@pytest.mark.parametrize("task", ["sleepstudy", "planted-answers", "cgd"])
def test_what_is_computed_from_answers_is_what_a_run_says_of_itself(task: str) -> None:
    data = federation(all_tasks()[task]).only(tuple(range(6)))
    clients = [*zip(data.x, data.y, data.x_test, data.y_test, strict=True)]
    result = fitting._trained(CONTESTANTS["bcfl-g"], "linear", data, LITTLE, {}, clients)
    ours, theirs = fitting._told(data, fitting._answers(data, result)), fitting._recorded(data, result.history[-1])
    assert ours.nll == pytest.approx(theirs.nll, rel=1e-4)
    for mine, other in zip(ours.measure, theirs.measure, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or mine == pytest.approx(other, rel=1e-4)
    assert ours.calibration.get("coverage90") == pytest.approx(theirs.calibration.get("coverage90"))


@pytest.mark.parametrize(("name", "tune"), [("fedprox", True), ("fedavg", False), ("pooled", False)])
def test_what_is_chosen_is_chosen_without_test_rows(name: str, tune: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = federation(all_tasks()["sleepstudy"])
    spoilt = replace(data, x_test=tuple(x + np.nan for x in data.x_test), y_test=tuple(y * 0 for y in data.y_test))
    losses: list[float] = []
    loss = fitting._loss

    def watched(evaluated: Any) -> float:
        losses.append(loss(evaluated))
        return losses[-1]

    monkeypatch.setattr(fitting, "_loss", watched)
    setting = Setting(rounds=2, local_steps=4)
    first, second = (chosen(CONTESTANTS[name], "linear", one, setting, tune=tune) for one in (data, spoilt))
    assert first == second
    half = len(losses) // 2
    assert half == 2 * (3 if tune else 1)  # after each round of each candidate
    assert losses[:half] == losses[half:]


def test_who_trains_alone_on_few_rows_stops_early() -> None:
    data = federation(all_tasks()["sleepstudy"])
    setting = Setting(rounds=30)
    rounds = chosen(CONTESTANTS["local"], "linear", data, setting, tune=False)["rounds"]
    early, late = (
        np.mean([loss or np.inf for loss in fit(CONTESTANTS["local"], "linear", data, setting, options).nll])
        for options in ({"rounds": rounds}, {})
    )
    assert rounds < 15
    assert early < late - 1


@pytest.mark.parametrize("name", ["fedavg", "bcfl-g", "bcfl", "pooled", "mixed-model"])
def test_new_sites_are_judged_by_what_was_learned_without_them(name: str) -> None:
    data = federation(all_tasks()["sleepstudy"])
    found = record(CONTESTANTS[name], "linear", data, LITTLE, tune=False, newcomers=True)
    assert found["sites"] == [data.sites[site] for site in data.newcomers]
    other = replace(data, y=tuple(y * 0 if site in data.newcomers else y for site, y in enumerate(data.y)))
    spoilt = record(CONTESTANTS[name], "linear", other, LITTLE, tune=False, newcomers=True)
    same = found["nll"] == spoilt["nll"]  # one model for all serves them whatever their own rows say
    assert same == (name in ("fedavg", "pooled"))


def test_who_trains_alone_has_nothing_to_say_of_new_sites() -> None:
    entries = replace(little("local,fedavg"), newcomers=True).entries()
    assert [key[1] for key in entries] == ["fedavg"]


def test_nobody_may_choose_among_more_than_others() -> None:
    assert {len(one.grid) for one in CONTESTANTS.values()} <= {0, 2}
    for one in CONTESTANTS.values():
        options = {option for candidate in one.grid for option in candidate}
        assert len(options) <= 1
        if one.federated:
            assert options <= {*entry_of(one.name).options, "learning_rate"}


def test_a_sitewide_number_of_clusters_leaves_two_sites_in_each() -> None:
    assert CONTESTANTS["ifca"].options_for(4) == {"num_clusters": 2}
    assert CONTESTANTS["ifca"].options_for(100) == {"num_clusters": 4}
    assert CONTESTANTS["fedavg"].options_for(4) == {}


def test_any_method_may_be_entered_by_name_and_an_unknown_one_is_refused() -> None:
    assert [one.name for one in contestants_named("fesem, bcfl-mh-6-w")] == ["fesem", "bcfl-mh-6-w"]
    with pytest.raises(ValueError, match="unknown method 'fedavgg'; did you mean 'fedavg'"):
        contestants_named("fedavgg")


@pytest.mark.slow
def test_quick_runs_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert "linear model" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["benchmark", "--out", str(tmp_path / "quick"), "--report", str(page)]) == 0
    assert "planted-answers" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", "exams"], "unknown task 'exams'"),
        (["--models", "cubic"], "unknown model 'cubic', known: linear, network"),
        (["--draws", "3"], "--draws must be from 0 to 2, got 3"),
        (["--draws", "a"], "--draws must be whole numbers"),
        (["--quick", "--tuned"], "exclude each other"),
        (["--report", "page.html"], "holds no results"),
    ],
)
def test_bad_input_is_refused_in_a_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["benchmark", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_list_tells_tasks_and_contestants_without_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "--list"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in (*all_tasks(), *CONTESTANTS))
