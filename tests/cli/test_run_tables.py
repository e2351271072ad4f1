"""A table from the command line: one command, from a file to who belongs where, site by site."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import bcfl
from bcfl.cli import main
from bcfl.report.page import report
from bcfl.report.reading import read_run

pd = pytest.importorskip("pandas")


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    """Four hospitals of two kinds, which differ in what a measurement means."""
    rng = np.random.default_rng(0)
    hospital = np.repeat(["Zurich", "Basel", "Bern", "Chur"], 60)
    x, ward = rng.normal(size=240), rng.choice(["heart", "lung"], 240)
    died = np.where(
        x * np.isin(hospital, ["Zurich", "Basel"]) - x * np.isin(hospital, ["Bern", "Chur"]) > 0, "yes", "no"
    )
    frame = pd.DataFrame({"hospital": hospital, "pressure": 120 + 20 * x, "ward": ward, "died": died})
    frame.to_csv(tmp_path / "patients.csv", index=False)
    frame.to_parquet(tmp_path / "patients.parquet")
    return tmp_path / "patients.csv"


QUICK = ["--set", "experiment.rounds=3", "--set", "method.num_clusters=2", "--quiet"]


def test_one_command_tells_of_every_site(patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    given = ["--data", str(patients), "--site", "hospital", "--target", "died", "--test", "0.2"]
    assert main(["run", *given, "--out", str(run), *QUICK]) == 0
    shown = capsys.readouterr().out
    assert all(
        re.search(rf"{name} +│ +48 │ +12 │ +\d │ +[\d.]+ │", shown) for name in ("Zurich", "Basel", "Bern", "Chur")
    )
    result = bcfl.load(run)
    assert int(result.assignment["Zurich"]) == int(result.assignment["Basel"]) != int(result.assignment["Bern"])
    rows = pd.read_csv(patients)
    own = rows[rows.hospital == "Bern"]
    assert (result.predictor("Bern").predict(own) == own.died).mean() > 0.8
    assert result.predict_proba("Bern", own).shape == (60, 2)
    assert result.associate(own.head(40)).cluster == int(result.assignment["Bern"])
    own.head(40).to_csv(tmp_path / "new.csv", index=False)
    capsys.readouterr()
    assert main(["associate", str(run), "--data", str(tmp_path / "new.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"] == int(result.assignment["Bern"])
    page = report([read_run(run)])
    assert "Site by site" in page
    assert "Chur" in page


def test_a_stopped_run_on_a_table_goes_on_to_the_same_result(
    patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(patients), "--site", "hospital", "--target", "died", "--seed", "3", *QUICK]
    assert main(["run", *given, "--out", str(tmp_path / "whole")]) == 0
    short = ["experiment.rounds=1" if text == "experiment.rounds=3" else text for text in given]
    assert main(["run", *short, "--out", str(tmp_path / "short")]) == 0
    assert main(["resume", str(tmp_path / "short"), "--rounds", "3", "--out", str(tmp_path / "long"), "--quiet"]) == 0
    whole, long = (bcfl.load(tmp_path / name) for name in ("whole", "long"))
    assert whole.summary() == long.summary()
    assert long.sites == whole.sites
    patients.write_text(patients.read_text().replace("heart", "lung", 1))
    assert main(["resume", str(tmp_path / "short"), "--rounds", "4", "--out", str(tmp_path / "other"), "--quiet"]) == 2
    assert "the examples are others" in capsys.readouterr().err


def test_a_parquet_file_gives_what_the_csv_file_gives(
    patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summaries = []
    for ending in ("csv", "parquet"):
        given = ["--data", str(patients.with_suffix(f".{ending}")), "--site", "hospital", "--target", "died", *QUICK]
        assert main(["run", *given, "--json", "--out", str(tmp_path / ending)]) == 0
        summaries.append({**json.loads(capsys.readouterr().out), "path": None})
    assert summaries[0]["names"] == ["Zurich", "Basel", "Bern", "Chur"]
    assert summaries[0]["assignment"] == summaries[1]["assignment"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--data", "x.csv", "--target", "died"], "--data needs --site COLUMN"),
        (["--site", "hospital"], "--site is for a table: give that, too, as --data FILE"),
        (["--data", "nowhere.csv", "--site", "a", "--target", "b"], "data nowhere.csv: no such file"),
        (["--set", "data.site=hospital"], "data.site is for data.name = table, not for digits"),
        (["--set", "data.name=heart", "--set", "data.partition=feature(4,2)"], "is divided into its sites as it is"),
        (["--set", "data.name=table"], "data set 'table' needs data.path"),
        (["--set", "model.name=table", "--set", "data.name=cifar10", "--set", "data.path=."], "not found in"),
    ],
)
def test_what_is_left_out_or_out_of_place_is_said(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *given, *QUICK]) == 2
    assert says in capsys.readouterr().err


def test_a_deployed_federation_refuses_a_table_that_nobody_holds(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flwr")
    assert main(["deploy", "local", "--set", "data.name=heart"]) == 2
    assert "each client brings prepared rows by --data-factory" in capsys.readouterr().err
