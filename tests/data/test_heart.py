"""The bundled hospitals: FLamby's patients and split, or all of them."""

from typing import Any

import pytest
import torch

from bcfl.cli import main
from bcfl.data.heart import heart
from bcfl.runs.problem import load_data
from bcfl.runs.settings import load_config


def sizes(table: Any, key: str) -> list[int]:
    return [len(one[key]) for one in table.values()]


def test_complete_patients_are_those_of_flamby_and_split_as_there() -> None:
    table = heart(None)
    assert list(table) == ["Cleveland", "Hungary", "Switzerland", "VA Long Beach"]
    assert sizes(table, "y_test") == [104, 89, 16, 45]
    assert [a + b for a, b in zip(sizes(table, "y"), sizes(table, "y_test"), strict=True)] == [303, 261, 46, 130]
    assert table.num_inputs == 13
    assert {"slope", "ca", "thal"}.isdisjoint(table.form.preparation.inputs)
    sick = [float(one["y_test"].float().mean() - one["y"].float().mean()) for one in table.values()]
    assert all(abs(apart) < 0.07 for apart in sick)  # stratified, as far as a hospital has both kinds


def test_all_patients_are_there_if_asked_for() -> None:
    table = heart(None, rows="all")
    assert [a + b for a, b in zip(sizes(table, "y"), sizes(table, "y_test"), strict=True)] == [303, 294, 123, 200]
    assert "ca missing" in table.form.preparation.inputs


def test_a_run_has_the_hospitals_by_name() -> None:
    data = load_data(load_config(None, ["data.name=heart"]))
    assert data.names == ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
    assert torch.equal(data.x_train, load_data(load_config(None, ["data.name=heart"], seed=5)).x_train)
    assert load_data(load_config(None, ["data.name=heart", "data.rows=all"])).num_examples.tolist() == [
        199,
        194,
        81,
        132,
    ]
    assert load_config(None, ["data.name=heart"]).data.partition == "sites"


def test_it_is_one_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "data.name=heart", "--set", "experiment.rounds=2", "--quiet", "--out", str(tmp_path / "run")]
    assert main(["run", *given]) == 0
    assert "VA Long Beach" in capsys.readouterr().out
