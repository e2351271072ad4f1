from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import change_lines, keep_rounds, write_eventful_run

from bcfl.report import charts
from bcfl.report.charts import Heat, Panel
from bcfl.report.reading import Run, group_runs, read_run, read_runs

MakeRun = Callable[..., Path]


def panel(chart: charts.Chart | None) -> Any:
    assert chart is not None
    return chart[0]


def test_curves_are_the_log(made_up: MakeRun) -> None:
    run = read_run(made_up())
    for key in ("accuracy", "macro_f1", "ari"):
        (line,) = panel(charts.by_round(group_runs([run]), key, key)).series
        assert line.x == [record["round"] for record in run.rounds]
        assert line.y == pytest.approx([record[key] for record in run.rounds], abs=5e-5)
    series = [one for part in charts.work(run) if isinstance(part, Panel) for one in part.series]
    for one, key in zip(series, ("parameters_down", "parameters_up", "local_steps", "scored_examples"), strict=True):
        assert one.y == [0] + [record["work"][key] for record in run.rounds]
    _, moved = charts.certainty(run) or ()
    assert isinstance(moved, Panel)
    assert moved.series[0].y == [record["changes"] for record in run.rounds]


def test_dots_are_the_last_round(made_up: MakeRun) -> None:
    run = read_run(made_up())
    (dots,) = panel(charts.client_measure(run)).series
    assert dots.y == pytest.approx(np.array(run.rounds[-1]["client_accuracy"])[run.order], abs=5e-5)
    count, confidence, correct = np.array(run.rounds[-1]["calibration"]).T
    *_, reliability = panel(charts.calibration(run)).series
    assert reliability.x == pytest.approx(confidence / count, abs=5e-5)
    assert reliability.y == pytest.approx(correct / count, abs=5e-5)


def test_heat_maps_are_the_marginals_and_the_manifest(made_up: MakeRun) -> None:
    run = read_run(made_up())
    heat = panel(charts.association(run, charts.shown_rounds(run, 10**6)))
    assert heat.rounds == list(range(1, 9))
    for frame, expected in zip(heat.frames, run.marginals, strict=True):
        np.testing.assert_allclose(np.array(frame).T, expected[run.order], atol=5.1e-4)
    held = np.array(run.manifest["train_labels"], dtype=float)[run.order]
    shares = panel(charts.labels(run))
    assert isinstance(shares, Heat)
    np.testing.assert_allclose(np.array(shares.frames[0]).T, held / held.sum(1, keepdims=True), atol=5.1e-4)


def test_a_heat_map_of_many_clients_shows_as_many_rounds_as_have_room(made_up: MakeRun) -> None:
    run = read_run(made_up(clients=1000, rounds=30, clusters=4))
    shown = charts.shown_rounds(run, 10_000)
    heat = panel(charts.association(run, shown))
    assert heat.rounds[0] == 1
    assert heat.rounds[-1] == 30
    assert np.size(heat.frames) <= 10_000


def test_bands_are_one_deviation_over_seeds(made_up: MakeRun) -> None:
    runs = read_runs([made_up(f"s{seed}", seed=seed) for seed in range(3)])
    (line,) = panel(charts.by_round(group_runs(runs), "accuracy", "accuracy")).series
    values = np.array([[record["accuracy"] for record in run.rounds] for run in runs])
    mean, deviation = values.mean(0), values.std(0, ddof=1)
    assert line.y == pytest.approx(mean, abs=5e-5)
    assert line.low == pytest.approx(mean - deviation, abs=1e-4)
    assert line.high == pytest.approx(mean + deviation, abs=1e-4)


def steps_until_each_round(run: Run) -> list[int]:
    return np.cumsum([record["work"]["local_steps"] for record in run.rounds]).tolist()


def test_methods_are_compared_at_equal_work(made_up: MakeRun) -> None:
    runs = read_runs([made_up("a"), made_up("b", method="bcfl-g", hypotheses=1)])
    lines = panel(charts.by_work(group_runs(runs), "accuracy", "accuracy")).series
    assert [line.x for line in lines] == [steps_until_each_round(run) for run in runs]


def test_seeds_that_are_not_tested_yet_have_no_place_in_the_work(made_up: MakeRun) -> None:
    tested, untested = keep_rounds(made_up("a0"), 5), keep_rounds(made_up("a1", seed=1), 1)
    change_lines(untested / "rounds.jsonl", lambda record: record.pop("accuracy", None))
    runs = read_runs([tested, untested])
    (line,) = panel(charts.by_work(group_runs(runs), "accuracy", "accuracy")).series
    assert line.x == steps_until_each_round(runs[0])


def test_what_happened_is_above_its_hypothesis_in_the_trellis(tmp_path: Path) -> None:
    tree = panel(charts.descent(read_run(write_eventful_run(tmp_path / "run"))))
    drawn = {one.name: one for one in tree.series}
    assert {"born", "merged", "given up", "newcomer", "changes group", "found again"} <= drawn.keys()
    assert drawn["born"].x == [3, 3]
    assert drawn["born"].y == [0.7, 2.7]
    assert drawn["given up"].y == [0.48, 1.7]  # above what else happened to the first in round 9
    low, high = tree.y_range
    assert low > 3
    assert high < 0.48  # nothing is cut off


def test_one_hypothesis_has_a_trellis_where_something_happened(made_up: MakeRun) -> None:
    path = made_up("g", method="bcfl-g", hypotheses=1)
    assert charts.descent(read_run(path)) is None

    def come_later(line: dict[str, Any]) -> None:
        if line["round"] <= 3:
            line["assignment"][0][0] = -1

    change_lines(path / "associations.jsonl", come_later)
    assert "newcomer" in [one.name for one in panel(charts.descent(read_run(path))).series]
