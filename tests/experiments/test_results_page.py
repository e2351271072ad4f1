"""The page of results: how rows stand beside the paper's, which row stands for a method, and that nothing is stale."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import measured
import pytest
from collect import compact
from measured import Printed, Row, paper_numbers, read_paper, read_records, rows_by_setting, rows_of
from results_page import MISSED, NEAR, REACHED, Reason, reason_of, results_page, standing, stands_for
from small_runs import small_config

from bcfl.runs.loop import start

ROOT = Path(__file__).parents[2]
PAPERS = {"accuracy": Printed(80.0, 0.5), "macro_f1": Printed(70.0, None)}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("runs") / "run"
    start(small_config(), path)
    return {**compact(path), "file": "results/run.json"}


def changed(record: dict[str, Any], accuracy: float, f1: float = 0.8, seed: int = 0, **settings: Any) -> dict[str, Any]:
    new = json.loads(json.dumps(record))
    new["result"] |= {"accuracy": accuracy, "macro_f1": f1, "seed": seed}
    new["config"]["experiment"]["seed"] = seed
    for key, value in settings.items():
        new["config"][key.partition("__")[0]][key.partition("__")[2]] = value
    return new


@pytest.mark.parametrize(
    ("accuracy", "f1", "expected"),
    [(0.8, 0.7, REACHED), (0.796, 0.7, NEAR), (0.794, 0.7, MISSED), (0.8, 0.699, MISSED), (0.9, 0.6, MISSED)],
)
def test_both_measures_decide_how_a_row_stands(
    record: dict[str, Any], accuracy: float, f1: float, expected: str
) -> None:
    (row,) = rows_of([changed(record, accuracy, f1)])
    assert standing(row, PAPERS) == expected


def test_the_row_with_the_stated_work_and_most_seeds_stands_for_a_method(record: dict[str, Any]) -> None:
    stated = {"training__local_steps": 10, "experiment__rounds": 100}
    runs = [changed(record, 0.5, seed=seed, **stated) for seed in range(2)]
    runs += [changed(record, 0.9, seed=seed, training__local_steps=20, experiment__rounds=100) for seed in range(3)]
    row = stands_for(record["result"]["method"], rows_of(runs))
    assert row is not None
    assert row.finals("accuracy") == [50.0, 50.0]


def test_a_reason_holds_for_the_seeds_it_was_written_for(record: dict[str, Any]) -> None:
    row = Row("bcfl-g", {}, [changed(record, 0.5)])
    reason = Reason("digits", ("bcfl-g",), (0,), "because.")
    assert reason_of("digits", row, [reason]) == "because."
    more = Row("bcfl-g", {}, [*row.runs, changed(record, 0.5, seed=1)])
    assert "not known" in reason_of("digits", more, [reason])
    assert "not known" in reason_of("elsewhere", row, [reason])


def test_the_page_is_made_of_the_results_that_are_there() -> None:
    text = (ROOT / "RESULTS.md").read_text()
    assert results_page(read_records(ROOT), read_paper(ROOT), ROOT) == text, "run python experiments/collect.py"
    assert len(text.encode()) <= 15_000
    for place in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / place).exists(), place


def test_every_reason_belongs_to_a_row() -> None:
    rows = rows_by_setting(measured.tested_problems(read_records(ROOT)), paper_numbers(read_paper(ROOT)))
    found = {(row.method, tuple(sorted(row.seeds))) for of_setting in rows.values() for row in of_setting}
    for reason in tomllib.loads((ROOT / "results/reasons.toml").read_text())["reason"]:
        for method in reason["methods"]:
            assert (method, tuple(reason["seeds"])) in found, (method, reason)
