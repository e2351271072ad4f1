"""How long many runs still take, as told by the rounds that are done."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_runs import small_config

from bcfl.runs.pace import RECENT, Outlook, Pace
from bcfl.runs.planning import Planned, plan
from bcfl.runs.progress import _left


def planned(out: Path, *names: str, rounds: int = 10) -> list[Planned]:
    """Runs by "method seed", more settings after them."""
    configs = []
    for name in names:
        method, seed, *more = name.split()
        own = (f"method.name={method}", f"experiment.seed={seed}", f"experiment.rounds={rounds}")
        configs.append(small_config(*own, *more))
    return plan(configs, out)


def pace_of(runs: Sequence[Planned]) -> Pace:
    return Pace([(run.config, run.path) for run in runs])


def took(run: Planned, *seconds: float) -> None:
    """The run has done these rounds."""
    run.path.mkdir(parents=True, exist_ok=True)
    with (run.path / "timings.jsonl").open("a") as file:
        for value in seconds:
            file.write(json.dumps({"round": 0, "seconds": value}) + "\n")


def test_nothing_is_known_before_the_first_round(tmp_path: Path) -> None:
    runs = planned(tmp_path, "fedavg 0", "ifca 0")
    assert pace_of(runs).outlook() == Outlook(0, 2, 0, 20, None, 2)


def test_a_run_goes_on_at_its_own_pace_and_lends_it_to_its_like(tmp_path: Path) -> None:
    runs = planned(tmp_path, "fedavg 0", "fedavg 1", "fedavg 2 data.seed=5")
    pace = pace_of(runs)
    took(runs[0], 1.0, 3.0)
    assert pace.outlook() == Outlook(0, 3, 2, 30, (8 + 10 + 10) * 2.0, 0)
    took(runs[1], 4.0)  # while another process is at it, too
    assert pace.outlook() == Outlook(0, 3, 3, 30, 8 * 2.0 + 9 * 4.0 + 10 * 3.0, 0)
    assert pace.outlook(at_once=2).seconds_left == (8 * 2.0 + 9 * 4.0 + 10 * 3.0) / 2
    took(runs[0], *[2.0] * 8)
    took(runs[1], *[4.0] * 9)
    took(runs[2], *[4.0] * 10)
    assert pace.outlook() == Outlook(3, 3, 30, 30, 0.0, 0)


def test_the_present_pace_counts(tmp_path: Path) -> None:
    (run,) = planned(tmp_path, "fedavg 0", rounds=100)
    took(run, *[50.0] * 5, *[2.0] * RECENT)
    assert pace_of([run]).outlook().seconds_left == (95 - RECENT) * 2.0


def test_an_unknown_method_is_guessed_from_others_on_the_same_data(tmp_path: Path) -> None:
    elsewhere = "data.partition=feature(4,3)"
    runs = planned(tmp_path, "bcfl-mh-3 0", "bcfl-c-6 0", "fedavg 0", f"fedavg 0 {elsewhere}")
    took(runs[0], 6.0)  # three hypotheses: 2 s each
    took(runs[3], *[100.0] * 10)
    found = pace_of(runs).outlook()
    assert found.seconds_left == pytest.approx(9 * 6.0 + 10 * 6 * 2.0 + 10 * 2.0)
    assert found.guessed == 2
    took(runs[2], 1.0)  # known now; the guess of what is not follows
    found = pace_of(runs).outlook()
    assert found.seconds_left == pytest.approx(9 * 6.0 + 10 * 6 * 1.5 + 9 * 1.0)
    assert found.guessed == 1


def test_stories_are_hypotheses_by_another_name(tmp_path: Path) -> None:
    runs = planned(tmp_path, "bcfl-auto 0 method.max_stories=4", "fedavg 0")
    took(runs[0], 8.0)  # 2 s each
    assert pace_of(runs).outlook() == Outlook(0, 2, 1, 20, 9 * 8.0 + 10 * 2.0, 1)


def test_where_no_round_on_the_data_is_known_other_data_must_do(tmp_path: Path) -> None:
    runs = planned(tmp_path, "fedavg 0", "fedavg 0 data.partition=feature(4,3)")
    took(runs[0], *[3.0] * 10)
    assert pace_of(runs).outlook() == Outlook(1, 2, 10, 20, 30.0, 1)


def test_half_a_line_is_not_a_round(tmp_path: Path) -> None:
    (run,) = planned(tmp_path, "fedavg 0")
    took(run, 2.0)
    with (run.path / "timings.jsonl").open("a") as file:
        file.write('{"round": 2, "sec')
    assert pace_of([run]).outlook() == Outlook(0, 1, 1, 10, 18.0, 0)


@pytest.mark.parametrize(
    ("seconds", "guessed", "says"),
    [
        (None, 3, "time left not known yet"),
        (0.2, 0, "about 0 s left"),
        (119.0, 0, "about 119 s left"),
        (600.0, 2, "about 10 min left, 2 runs' share guessed from other methods"),
        (3 * 3600 + 59 * 60 + 50, 0, "about 4 h 0 min left"),
        (60.0 * 3600, 0, "about 2.5 days left"),
    ],
)
def test_time_left_is_told_in_words(seconds: float | None, guessed: int, says: str) -> None:
    assert _left(Outlook(0, 1, 0, 1, seconds, guessed)) == says
