"""The command line as its users meet it: one clear line for what is wrong, tables and JSON for what is right."""

import builtins
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcfl import __version__
from bcfl.cli import build, main
from bcfl.data.datasets import DATASETS
from bcfl.data.manifest import save_partition
from bcfl.methods import METHODS
from bcfl.model.zoo import MODELS
from bcfl.runs.loop import start
from bcfl.runs.problem import load_data
from bcfl.runs.reference import all_settings
from bcfl.runs.settings import Config, load_config
from bcfl.runs.store import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = {
    "data.partition": "feature(4,2)",
    "experiment.rounds": "2",
    "training.local_steps": "2",
    "method.scoring_examples": "30",
}
MINE = """
import torch
from torch import nn

def rows(n=12, classes=3):
    return torch.randn(n, 4), torch.arange(n) % classes

def clients():
    torch.manual_seed(0)
    return [(*rows(), *rows(6)) for _ in range(5)]
def untested():
    torch.manual_seed(0)
    return [rows() for _ in range(5)]
def many_labels(): return [rows(13, 13) for _ in range(5)]
def no_clients(): return []
def fails(): raise KeyError("my own\\nmistake")
def needs_more(x): return x

def model(): return nn.Linear(4, 3)
def images_to_five(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
def no_module(): return 3
def no_parameters(): return nn.ReLU()
number = 3
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with the user's module somewhere else on the path, and no data sets."""
    (tmp_path / "code").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "code" / "mine.py").write_text(MINE)
    (tmp_path / "code" / "broken.py").write_text("def model(:\n")
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setenv("BCFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    for module in ("mine", "broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def settings(**changes: str) -> list[str]:
    """--set options of a run of a second; section__key=value changes them, and one's own data are not cut."""
    small = {key: value for key, value in SMALL.items() if "data__factory" not in changes or key != "data.partition"}
    values = small | {key.replace("__", "."): value for key, value in changes.items()}
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def call(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ending:  # argparse leaves this way
        return int(ending.code or 0)


def own(factory: str, **changes: str) -> list[str]:
    mine = {"data__factory": f"mine:{factory}", "model__factory": "mine:model", "method__num_clusters": "2"}
    return ["run", *settings(**mine | changes)]


DRY_RUN = ["sweep", str(ROOT / "experiments/table1-cifar10.toml"), "--dry-run"]
BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "unknown key": (["run", *settings(training__learnin_rate="1")], "did you mean training.learning_rate"),
    "no setting": (["run", "--set", "rounds=3"], "section.key, got 'rounds'"),
    "out of range": (["run", *settings(training__momentum="1")], "training.momentum must be in [0, 1), got 1"),
    "unknown method": (["run", *settings(method__name="fedavgg")], "did you mean 'fedavg'?"),
    "unknown model": (["run", *settings(model__name="mpl")], "did you mean 'mlp'?"),
    "more clusters than clients": (["run", *settings(method__num_clusters="9")], "there are only 8 clients"),
    "M too large": (["run", *settings(method__name="bcfl-mh-99", method__num_clusters="1")], "allow only 1"),
    "bad partition": (["run", *settings(data__partition="feature(4)")], "partition 'feature(4)' is not one of"),
    "missing data": (["run", *settings(data__name="cifar10", data__path="none.npz")], "none.npz: no such file"),
    "missing partition file": (
        ["run", *settings(data__partition="file", data__partition_file="none.npz")],
        "partition file none.npz does not exist",
    ),
    "labels out of the model's range": (own("many_labels"), "at least 13 classes"),
    "factory of no clients": (own("no_clients"), "at least one client is needed"),
    "factory that fails": (own("fails"), "data.factory 'mine:fails' failed: KeyError: 'my own\\nmistake'"),
    "factory with arguments": (own("needs_more"), "data.factory 'mine:needs_more' failed: TypeError"),
    "module that is not there": (["run", *settings(model__factory="yours:model")], "No module named 'yours'"),
    "function that is not there": (["run", *settings(model__factory="mine:modle")], "has no attribute 'modle'"),
    "module that is not Python": (["run", *settings(model__factory="broken:model")], "cannot be imported: SyntaxError"),
    "factory that is a number": (["run", *settings(model__factory="mine:number")], "must be a function, got int"),
    "model of too few classes": (["run", *settings(model__factory="mine:images_to_five")], "at least 10 classes"),
    "model that is none": (["run", *settings(model__factory="mine:no_module")], "return a torch.nn.Module, got int"),
    "model without parameters": (["run", *settings(model__factory="mine:no_parameters")], "no parameters to train"),
    "model that fails": (["run", *settings(model__factory="mine:fails")], "'mine:fails' failed: KeyError"),
    "own clients, cut": (own("clients", data__partition="label(4,5,0.1)"), "data.partition is for named data sets"),
    "own clients without a model": (["run", *settings(data__factory="mine:clients")], "model.name must be given"),
    "negative seed": (["run", *settings(), "--seed", "-1"], "experiment.seed must be ≥ 0, got -1"),
    "seed that is no number": (["run", "--seed", "x"], "--seed 'x' is not a valid integer"),
    "no workers": (["run", "--workers", "0"], "--workers must be a whole number of at least 1, got '0'"),
    "missing settings file": (["run", "none.toml"], "none.toml does not exist"),
    "a folder as settings file": (["run", "."], "cannot be read"),
    "no run to resume": (["resume", "runs"], "runs is not a run folder"),
    "no command of ours": (["rum"], "No such command 'rum'. (Did you mean one of: 'resume', 'run'?)"),
    "seeds that are no numbers": (["compare", "--methods", "fedavg", "--seeds", "0,x"], "--seeds must be whole"),
    "no seeds": (["compare", "--methods", "fedavg", "--seeds", ""], "--seeds must be whole numbers"),
    "a seed beside seeds": (
        ["compare", "--methods", "fedavg", "--set", "experiment.seed=3"],
        "a comparison takes experiment.seed from --seeds, not from --set",
    ),
    "a method beside methods": (
        ["compare", "--methods", "fedavg", "--set", "method.name=ifca"],
        "a comparison takes method.name from --methods, not from --set",
    ),
    "no methods": (["compare", "--methods", ","], "--methods must name at least one method"),
    "a mistake in the last method": (["compare", *settings(), "--methods", "fedavg,ifka"], "did you mean 'ifca'?"),
    "missing sweep file": (["sweep", "none.toml"], "none.toml does not exist"),
    "unknown data set in a dry run": ([*DRY_RUN, "--set", "data.name=cifer10"], "did you mean cifar10?"),
    "a list of nothing": (["list", "things"], "'things' is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_clear_line_and_leaves_nothing(
    case: str, own_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, says = BAD_INPUT[case]
    assert call(arguments) == 2
    output = capfd.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("bcfl")
    assert " ".join(says.split()) in line
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"), [("broken", b"[data\n"), ("binary", b"\xff\xfe"), ("scalar", b"experiment = 3\n")]
)
def test_damaged_settings_get_one_clear_line(
    name: str, content: bytes, own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_folder / f"{name}.toml"
    path.write_bytes(content)
    assert call(["run", str(path), "--seed", "1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(own_folder.iterdir()) == [path]


def damaged_npz(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 and nothing that follows")


def foreign_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, something=np.zeros(3))


@pytest.mark.parametrize("write", [damaged_npz, foreign_npz])
@pytest.mark.parametrize(
    "use", [{"data__name": "cifar10", "data__path": "a.npz", "data__partition": "label(0,4,1.0)"},
            {"data__partition": "file", "data__partition_file": "a.npz"}]
)  # fmt: skip
def test_a_damaged_data_file_gets_one_clear_line(
    write: Callable[[Path], None], use: dict[str, str], own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(own_folder / "a.npz")
    assert call(["run", *settings(**use)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a.npz" in line
    assert [item.name for item in own_folder.iterdir()] == ["a.npz"]


def test_an_output_folder_that_holds_something_is_left_alone(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own_folder / "run"
    start(load_config(None, [f"{key}={value}" for key, value in SMALL.items()]), run, num_workers=1)
    before = {item: item.read_bytes() for item in run.rglob("*") if item.is_file()}
    for arguments, says in [
        (["run", *settings(experiment__seed="1"), "--out", "run"], "another run: experiment.seed is 0 there, 1 here"),
        (["run", *settings(), "--out", "run"], "already holds this run, complete"),
        (["run", *settings(), "--out", "run/config.json"], "Not a directory"),
        (["run", *settings(), "--out", "run/config.json/deeper"], "Not a directory"),
    ]:
        assert call(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
    assert {item: item.read_bytes() for item in run.rglob("*") if item.is_file()} == before


WRITING = {
    "run": ["run", "--out"],
    "TensorBoard": ["run", "--tensorboard"],
    "MLflow": ["run", "--mlflow"],
    "resume": ["resume", "run", "--rounds", "9", "--out"],
    "compare": ["compare", "--methods", "fedavg", "--out"],
    "sweep": ["sweep", "a.toml", "--out"],
    "report": ["report", "run", "--out"],
    "figures": ["figures", "run", "--out"],
    "demo": ["demo", "--out"],
    "associate": ["associate", "run", "--data", "a.npz", "--save"],
    "evaluate": ["evaluate", "run", "--out"],
    "deploy local": ["deploy", "local", "--out"],
    "deploy init": ["deploy", "init"],
}


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize(
    "place", ["", " ", "a file/below", "n" * 300, "new/" + "ä" * 200, "/proc/nowhere", "\udcff", "/dev/null/x", "a\0b"]
)
def test_an_unusable_place_is_told_before_any_work(
    command: str, place: str, own_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever there is to be read is not there either: nobody has looked."""
    (own_folder / "a file").touch()
    assert call([*WRITING[command], place]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert output.out == ""
    assert "must be a name" in line or "cannot be written" in line
    assert [item.name for item in own_folder.iterdir()] == ["a file"]


@pytest.mark.parametrize("command", [["report", "run", "--out"], ["evaluate", "run", "--out"]])
def test_a_device_is_not_replaced_by_a_file(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*command, "/dev/null"]) == 2
    assert "/dev/null is no regular file" in capsys.readouterr().err


def test_a_full_disk_gets_one_line_that_names_the_way_on(
    own_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(RunFolder, "append", full)
        assert call(["run", *settings(), "--out", "a run", "--quiet"]) == 1
    assert capsys.readouterr().err == (
        "bcfl: the run in a run stopped: the disk is full; continue it with `bcfl resume 'a run'`\n"
    )
    assert call(["resume", "a run", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2


def test_an_interruption_names_the_way_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", interrupt)
        assert call(["run", *settings(), "--out", "run", "--quiet"]) == 130
    assert capsys.readouterr().err == "bcfl: interrupted; continue the run with `bcfl resume run`\n"


def test_an_interruption_while_torch_loads_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = builtins.__import__

    def interrupted(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name == "bcfl.methods":
            raise KeyboardInterrupt
        return load(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert main(["list", "methods"]) == 130
    assert capsys.readouterr().err == "bcfl: interrupted\n"


def test_a_run_that_fails_is_in_no_other_runs_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: Config, *arguments: Any, **options: Any) -> Any:
        if config.method["name"] == "fedavg":
            raise RuntimeError("a fault\nof two lines")
        return start(config, *arguments, **options)

    arguments = ["compare", *settings(), "--methods", "fedavg,ifca", "--quiet", "--json"]
    with monkeypatch.context() as patch:
        patch.setattr("bcfl.runs.sweep.start", fail)
        assert call(arguments) == 1
    shown = capsys.readouterr()
    assert [run["method"] for run in json.loads(shown.out)] == ["ifca"]
    (line,) = shown.err.splitlines()
    assert re.fullmatch(
        r"bcfl: failed: runs/digits-fedavg-\S+: RuntimeError: a fault of two lines \(\S+, line \d+\)", line
    )
    assert call(arguments) == 0
    assert [run["method"] for run in json.loads(capsys.readouterr().out)] == ["fedavg", "ifca"]


def test_a_request_to_end_names_the_way_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(RunFolder, "append", end)
    assert call(["run", *settings(), "--out", "run", "--quiet"]) == 130
    assert capsys.readouterr().err == "bcfl: interrupted; continue the run with `bcfl resume run`\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_run_shows_who_is_where_and_keeps_everything(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", *settings(), "--seed", "3"]) == 0
    output = capsys.readouterr()
    assert "who is where" in output.out
    lines = output.err.splitlines()  # no terminal: plain lines
    assert "8 clients" in lines[0]
    assert re.match(r"round 2/2 .*0\.\d{3}", lines[-1])
    assert "\x1b" not in output.out + output.err
    assert (own_folder / "runs" / "digits-bcfl-mh-3-s3" / "result.json").exists()
    assert call(["run", *settings(), "--seed", "3", "--quiet"]) == 0  # never into the folder of another run
    output = capsys.readouterr()
    assert "kept in runs/digits-bcfl-mh-3-s3-2" in output.out
    assert output.err == ""


def test_every_client_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = settings(experiment__clients_per_round="3", experiment__rounds="1")
    assert call(["run", *arguments, "--quiet"]) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    counts = {row[0]: int(row[2]) for row in rows if len(row) == 4 and row[2].isdecimal()}
    assert sum(counts.values()) == 8
    assert counts["none"] == 5  # they never took part


def test_json_is_all_that_stands_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", *settings(), "--out", "run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["path"] == "run"
    assert [sum(row) for row in shown["probability"]] == pytest.approx([1] * 8, abs=1e-5)
    assert shown.items() >= json.loads(Path("run/result.json").read_text()).items()


def test_resuming_a_complete_run_prints_it_and_trains_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(["run", *settings(), "--out", "run", "--quiet"]) == 0
    first = capsys.readouterr()
    monkeypatch.setattr("bcfl.runs.loop.Simulator", None)
    assert call(["resume", "run"]) == 0
    assert capsys.readouterr() == (first.out, "the run in run is complete: nothing is left to do\n")


def test_a_run_goes_on_for_more_rounds_in_a_folder_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", *settings(), "--out", "run", "--quiet"]) == 0
    rounds = len(Path("run/timings.jsonl").read_text().splitlines())
    assert call(["resume", "run", "--rounds", str(rounds + 1), "--quiet"]) == 0
    assert f"kept in run-{rounds + 1}-rounds" in capsys.readouterr().out
    assert call(["resume", "run", "--rounds", str(rounds + 2), "--out", "runs/longer", "--quiet"]) == 0
    with contextlib.chdir("run"):
        assert call(["resume", ".", "--rounds", str(rounds + 3), "--quiet"]) == 0
    assert Path(f"run-{rounds + 3}-rounds/result.json").exists()
    first, longer = (Path(name, "rounds.jsonl").read_text() for name in ("run", "runs/longer"))
    assert longer.startswith(first)
    assert len(longer.splitlines()) == len(first.splitlines()) + 2
    capsys.readouterr()
    assert call(["resume", "run", "--rounds", str(rounds)]) == 2
    assert f"the run in run has {rounds} rounds: more than these must be asked for" in capsys.readouterr().err
    assert call(["resume", "run", "--out", "other"]) == 2
    assert "--out is for --rounds" in capsys.readouterr().err


def test_going_on_for_more_rounds_can_be_tried_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(["run", *settings(), "--out", "run", "--quiet"]) == 0
    more = ["resume", "run", "--rounds", "9", "--quiet"]
    assert call([*more, "--device", "tpu"]) == 2
    assert not Path("run-9-rounds").exists()
    with monkeypatch.context() as patch:
        patch.setattr("bcfl.runs.loop.resume", stop)
        assert call(more) == 130
    assert call(more) == 0
    assert "kept in run-9-rounds" in capsys.readouterr().out


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_what_the_figures_cannot_tell_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*own("untested"), "--set", "method.name=bcfl-g", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "no client has test data" in shown
    assert "one hypothesis" in shown
    assert call([*own("clients"), "--quiet"]) == 0
    assert "one hypothesis" not in capsys.readouterr().out


def test_own_model_and_clients_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*own("clients"), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "kept in runs/own-bcfl-mh-3-s0" in shown
    assert "agreement" not in shown  # nobody said what the true groups are
    (Path("runs/own-bcfl-mh-3-s0/result.json")).unlink()
    assert call(["resume", "runs/own-bcfl-mh-3-s0", "--quiet", "--data-path", "elsewhere"]) == 0  # needed by none
    assert capsys.readouterr().out == shown
    assert call(["evaluate", "runs/own-bcfl-mh-3-s0", "--data-path", "elsewhere"]) == 0


def test_the_working_directory_is_a_place_for_own_modules(
    own_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (own_folder / "here.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "here", raising=False)
    changes = {"data__factory": "here:clients", "model__factory": "here:model", "method__num_clusters": "2"}
    assert call(["run", *settings(**changes), "--quiet", "--json", "--out", "run"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    Path("run/result.json").unlink()
    sys.path.remove(str(own_folder))
    del sys.modules["here"]  # in another process, a folder that may be a stranger's
    for command in (["resume"], ["evaluate"], ["resume", "--rounds", "3"]):
        assert call([*command, "run"]) == 2
        assert "here" not in sys.modules
    as_module = subprocess.run([sys.executable, "-m", "bcfl", "resume", "run"], capture_output=True, text=True)
    assert as_module.returncode == 2
    assert "'here:clients' cannot be imported" in as_module.stderr
    sys.path.insert(0, str(own_folder))  # as PYTHONPATH=. does
    assert call(["resume", "run", "--quiet"]) == 0


def test_names_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"data__name": "digits_five", "data__domains": '["optdigits"]', "data__partition": "feature(1,2)",
               "model__factory": "mine:images", "method__num_clusters": "2"}  # fmt: skip
    Path(sys.path[0], "mine.py").write_text(
        MINE + "def images(): return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(147, 10))\n"
    )
    assert call(["run", *settings(**changes), "--out", "run [a]"]) == 0
    output = capsys.readouterr()
    assert "kept in run [a]" in output.out
    assert output.err.startswith("bcfl-mh-3 on digits_five[optdigits] feature(1,2) seed 0, 2 clients")


def test_compare_prints_mean_and_deviation_and_runs_nothing_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["compare", *settings(), "--methods", "fedavg, ifca", "--seeds", "0,1,0", "--out", "all"]
    assert call(arguments) == 0
    output = capsys.readouterr()
    assert len(re.findall(r"0\.\d{3} ± 0\.\d{3}", output.out)) >= 4
    assert "8 clients" in output.err
    assert "all: 0 of 4 runs, 1 of 8 rounds" in output.err
    assert output.err.splitlines()[-1].endswith("all: 4 of 4 runs, 8 of 8 rounds, about 0 s left")
    assert len(list(Path("all").iterdir())) == 4
    monkeypatch.setattr("bcfl.runs.loop.Simulator", None)
    assert call(arguments) == 0
    assert capsys.readouterr() == (output.out, "all 4 runs are complete: nothing is left to run\n")
    assert call([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(run["method"], run["seed"]) for run in shown] == [(m, s) for m in ("fedavg", "ifca") for s in (0, 1)]


def test_sweep_lists_and_runs_what_its_file_describes(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text('[sweep]\nmethods = ["ifca"]\nseeds = [0, 1]\n')

    def listed() -> list[bool]:
        assert call(["sweep", "a.toml", *settings(), "--dry-run", "--json"]) == 0
        return [run["done"] for run in json.loads(capsys.readouterr().out)]

    assert listed() == [False, False]
    assert [item.name for item in own_folder.iterdir()] == ["a.toml"]
    assert call(["sweep", "a.toml", *settings(), "--quiet", "--json"]) == 0
    assert [run["seed"] for run in json.loads(capsys.readouterr().out)] == [0, 1]
    assert listed() == [True, True]


def test_a_sweep_leaves_out_what_has_results_in_another_folder(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.toml").write_text('[sweep]\nmethods = ["fedavg", "ifca"]\nseeds = [0, 1]\n')
    arguments = ["sweep", "a.toml", *settings(), "--without", "results"]
    assert call(arguments) == 2
    assert "there is no folder results" in capsys.readouterr().err
    Path("results").mkdir()
    assert call([*arguments, "--dry-run"]) == 0
    first, *others = [Path(line.split()[-1]).name for line in capsys.readouterr().out.splitlines()]
    assert len(others) == 3
    for name in others:
        Path("results", f"{name}.json").touch()
    assert call([*arguments, "--quiet", "--json"]) == 0
    assert [Path(run["path"]).name for run in json.loads(capsys.readouterr().out)] == [first]
    Path("results", f"{first}.json").touch()
    assert call([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_dry_run_lists_data_that_are_absent(capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*DRY_RUN, "--set", "data.path=nowhere"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"to"}


def test_set_narrows_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text('[sweep]\nmethods = ["fedavg", "ifca"]\nseeds = [0, 1]\n')
    assert call(["sweep", "a.toml", "--set", "experiment.seed=7", "--set", "method.name=bcfl-g", "--dry-run"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("to do runs/digits-bcfl-g-s7-")


def test_a_sweep_over_a_split_that_has_changed_gets_one_clear_line(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.toml").write_text('[sweep]\nmethods = ["ifca"]\n')
    arguments = ["sweep", "a.toml", *settings(data__partition="file", data__partition_file="split.npz"), "--quiet"]
    for partition, code in (("feature(4,2)", 0), ("feature(4,4)", 2)):
        save_partition("split.npz", load_data(load_config(None, [f"data.partition={partition}"])))
        assert call(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    (run,) = Path("runs").iterdir()
    assert line.startswith(f"bcfl: the run in {run} does not fit the data at hand: ")
    assert line.endswith(f"choose another folder with --out, or delete {run} to run it again")


def test_a_sweep_names_what_varies(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text(
        '[sweep]\nmethods = ["fedavg", "bcfl-g"]\nseeds = [0, 1]\nvary = { "method.fusion" = ["exact", "geometric"] }\n'
    )
    assert call(["sweep", "a.toml", *settings()]) == 0
    output = capsys.readouterr()
    assert "[2/6] bcfl-g fusion exact seed 0, 8 clients" in output.err
    head, *rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in output.out.splitlines()
                   if line[:1] in "│┃"]  # fmt: skip
    assert head[:3] == ["method", "fusion", "accuracy"]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("fedavg", "", "2"), ("bcfl-g", "exact", "2"), ("bcfl-g", "geometric", "2")
    ]  # fmt: skip
    assert call(["sweep", "a.toml", *settings(), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(run["seed"], run["settings"]) for run in shown] == [
        (seed, own) for seed in (0, 1) for own in ({}, {"method.fusion": "exact"}, {"method.fusion": "geometric"})
    ]
    assert all(Path(run["path"], "result.json").is_file() for run in shown)


@pytest.mark.parametrize(
    ("what", "things"),
    [("methods", METHODS), ("datasets", DATASETS), ("models", MODELS), ("settings", all_settings())],
)
def test_list_names_everything(what: str, things: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list", what, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == list(things)
    assert all(shown.values())  # each with a word about it
    assert call(["list", what]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in things)


def test_list_alone_lists_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*METHODS, *DATASETS, *MODELS, *all_settings()))
    assert call(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"methods", "datasets", "models", "likelihoods", "settings"}


def test_help_has_an_example_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*build().commands, "deploy local", "deploy init"):
        if name == "deploy":
            continue
        assert call([*name.split(), "--help"]) == 0
        examples = capsys.readouterr().out.split("examples:\n")[1].strip().splitlines()
        assert all(line.strip().startswith(f"bcfl {name}") for line in examples)
    assert call(["--help"]) == 0
    assert "bcfl resume runs/a" in capsys.readouterr().out


def test_without_a_command_there_is_help_and_with_version_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call([]) == 0
    assert "Usage: bcfl" in capsys.readouterr().out
    assert call(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "bcfl", "sweep", "experiments/table1-cifar10.toml", "--dry-run"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.slow
def test_a_terminal_sees_a_bar(own_folder: Path) -> None:
    """Round, accuracy, changes and time left, on a real pseudo-terminal."""
    text = _on_a_terminal(["run", *settings(experiment__rounds="8"), "--out", "run"])
    assert "━" in text
    assert "8/8" in text
    assert re.search(r"0:00:\d\d", text)
    assert re.search(r"accuracy 0\.\d{3}  \d moved", text)


@pytest.mark.slow
def test_a_terminal_sees_a_whole_sweep(own_folder: Path) -> None:
    # Long enough that the bar, drawn ten times a second, is seen in between.
    text = _on_a_terminal(["compare", *settings(experiment__rounds="12"), "--methods", "fedavg,ifca", "--seeds", "0,1"])
    assert "all, 0 of 4 runs done" in text
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # colours
    assert re.search(r"\d+/48 about \d+ s left", text)
    assert "48/48" in text


def _on_a_terminal(arguments: list[str]) -> str:
    """What a command shows on a pseudo-terminal."""
    master, slave = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    command = [sys.executable, "-m", "bcfl", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while chunk := _read(master):
        shown += chunk
    assert process.wait() == 0
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other side is closed
        return b""
