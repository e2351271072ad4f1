"""The live view against the real packages."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from bcfl.cli import main
from bcfl.report.trackers import LiveView, MLflow, live_view, numbers
from bcfl.runs.settings import Config, load_config

RUN = ["run", "--quiet", "--json", "--workers", "1", "--set", "experiment.rounds=3",
       "--set", "data.partition='feature(4,2)'"]  # fmt: skip


def log_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()][1:]


def read_tensorboard(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    events = accumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within TensorBoard and protobuf
def test_tensorboard_has_the_rounds(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run, logs = tmp_path / "run", tmp_path / "logs"
    assert main([*RUN, "--out", str(run), "--tensorboard", str(logs)]) == 0
    events, records = read_tensorboard(logs), log_of(run)
    for tag, key in (("quality/accuracy", "accuracy"), ("association/changes", "changes"), ("association/ari", "ari")):
        logged = events.Scalars(tag)
        assert [event.step for event in logged] == [1, 2, 3]
        assert [event.value for event in logged] == pytest.approx([record[key] for record in records], rel=1e-6)
    assert [e.value for e in events.Scalars("work/local_steps")] == [r["work"]["local_steps"] for r in records]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_takes_back_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = load_config(None, ["experiment.rounds=3"])
    for first, accuracy in ((1, 0.1), (2, 0.9)):  # stopped after round 2; resumed from the checkpoint of round 1
        with live_view(tmp_path, None) as (view,):
            play(view, config, range(first, 3), accuracy)
    events = read_tensorboard(tmp_path).Scalars("quality/accuracy")
    assert [(e.step, round(e.value, 3)) for e in events] == [(1, 0.1), (2, 0.9)]


def play(view: LiveView, config: Config, rounds: range, accuracy: float) -> None:
    view.started(config, None, rounds[0])  # type: ignore[arg-type]  # loggers do not look at the data
    for index in rounds:
        view.round_done({"round": index, "work": {"local_steps": 5}, "changes": 0, "accuracy": accuracy}, 0.5)


@pytest.mark.filterwarnings("ignore")  # within MLflow and SQLAlchemy
def test_mlflow_has_the_rounds_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    config = load_config(None, ["experiment.rounds=3"], seed=7)
    folder = tmp_path / "mlflow"
    with live_view(None, str(folder)) as (view,):
        play(view, config, range(1, 3), 0.25)
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == MLflow.EXPERIMENT]
    (stopped,) = client.search_runs([experiment.experiment_id])
    assert stopped.info.status == "KILLED"
    with live_view(None, str(folder)) as (view,):
        play(view, config, range(3, 4), 0.75)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "bcfl-mh-3-s7"
    assert run.data.params["experiment.seed"] == "7"
    history = client.get_metric_history(run.info.run_id, "quality/accuracy")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.25), (3, 0.75)]


def test_numbers_leave_out_what_was_not_measured() -> None:
    record = {"round": 1, "work": {"trainings": 4}, "changes": 2, "ari": None}
    assert numbers(record, 1.5) == {"association/changes": 2, "work/trainings": 4, "work/seconds": 1.5}


def test_a_complete_run_is_not_logged_again() -> None:
    logger = Remembers()
    config = load_config(None, ["experiment.rounds=3"])
    LiveView([logger]).started(config, None, 4)  # type: ignore[arg-type]
    assert logger.asked == []
    LiveView([logger]).started(config, None, 3)  # type: ignore[arg-type]
    assert logger.asked == ["begin"]


class Remembers:
    """A logger that remembers what it was asked, and fails where it is told to."""

    def __init__(self, fails_at: str = ""):
        self._fails_at = fails_at
        self.asked: list[str] = []

    def begin(self, config: Config, first_round: int) -> None:
        self._answer("begin")

    def log(self, round_index: int, numbers: Any) -> None:
        self._answer("log")

    def close(self) -> None:
        self._answer("close")

    def _answer(self, question: str) -> None:
        self.asked.append(question)
        if question == self._fails_at:
            raise ConnectionError("nobody\nanswers")


@pytest.mark.parametrize(
    ("fails_at", "asked"),
    [("begin", ["begin"]), ("log", ["begin", "log"]), ("close", ["begin", "log", "log", "close"])],
)
def test_a_logger_that_fails_does_not_end_the_run(
    fails_at: str, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    failing, sound = Remembers(fails_at), Remembers()
    view = LiveView([failing, sound])
    play(view, load_config(None, ["experiment.rounds=2"]), range(1, 3), 0.5)
    view.close()
    assert failing.asked == asked  # then it is left in peace: waiting for a dead server would hold up every round
    assert sound.asked == ["begin", "log", "log", "close"]
    (warning,) = caplog.messages
    assert warning == "the run goes on without Remembers from here: ConnectionError: nobody answers"


def test_a_logger_that_cannot_be_closed_does_not_hide_why_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bcfl.report.trackers.TensorBoard", lambda folder: Remembers("close"))
    with pytest.raises(KeyboardInterrupt), live_view(tmp_path, None):
        raise KeyboardInterrupt
    assert len(caplog.messages) == 1


@pytest.mark.filterwarnings("ignore")  # within MLflow and SQLAlchemy
@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("foo://bar", "unsupported URI"),
        ("sqlite:////dev/null/mlflow.db", "File exists"),
        ("http://127.0.0.1:9", "Connection refused"),
    ],
)
def test_an_mlflow_that_cannot_be_reached_is_one_line_before_the_run(
    tmp_path: Path, uri: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    began = time.perf_counter()
    assert main([*RUN, "--out", str(tmp_path / "run"), "--mlflow", uri]) == 2
    assert time.perf_counter() - began < 60  # MLflow itself would try a dead server for minutes
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bcfl: ")]
    assert len(told) == 1
    assert told[0].startswith(f"bcfl: --mlflow {uri} cannot be used (give a folder, or the address of ")
    assert reason in told[0]
    assert not (tmp_path / "run").exists()
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ  # later, a server may be away for a while


@pytest.mark.filterwarnings("ignore")
def test_a_missing_driver_of_a_data_base_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")

    def no_driver(**_: Any) -> None:
        raise ModuleNotFoundError("No module named 'psycopg'")

    monkeypatch.setattr(tracking, "MlflowClient", no_driver)
    with pytest.raises(ValueError, match=r"^--mlflow postgresql://h/x cannot be used .*No module named 'psycopg'$"):
        MLflow("postgresql://h/x")


@pytest.mark.filterwarnings("ignore")
def test_a_run_outlives_its_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")

    def fails(*_: Any, **__: Any) -> None:
        raise ConnectionError("the server went away")

    monkeypatch.setattr(tracking.MlflowClient, "log_batch", fails)
    monkeypatch.setattr(tracking.MlflowClient, "set_terminated", fails)
    assert main([*RUN, "--out", str(tmp_path / "run"), "--mlflow", str(tmp_path / "mlflow")]) == 0
    assert len(log_of(tmp_path / "run")) == 3
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("bcfl")]
    assert warning == "the run goes on without MLflow from here: ConnectionError: the server went away"


def test_an_unusable_folder_for_tensorboard_is_one_line_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    assert main([*RUN, "--out", str(tmp_path / "run"), "--tensorboard", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("option", "package"), [("--tensorboard", "tensorboard"), ("--mlflow", "mlflow")])
def test_missing_extra_is_one_line(
    tmp_path: Path, option: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*RUN, "--out", str(tmp_path / "run"), option, str(tmp_path / "logs")]) == 2
    assert f"needs {package}, which is not installed: pip install 'bcfl[tracking]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
