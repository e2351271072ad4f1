"""A federation's processes end with the run, and the run's end is told; without a federation."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from bcfl.deploy import launch
from bcfl.deploy.folder import Site
from bcfl.deploy.processes import Federation, follow, run_local
from bcfl.runs.observers import Observer
from bcfl.runs.settings import Config, parse_config
from bcfl.runs.stopping import RunStoppedError
from bcfl.runs.store import RunFolder

CONFIG = parse_config({"method": {"name": "fedavg"}, "data": {"partition": "feature(3,1)", "rotations": [0, 90, 180]}})


@pytest.mark.parametrize(
    ("run", "status", "code"),
    [
        ('{"success": true, "run-id": "7"}', "finished:completed", 0),
        ('{"success": true, "run-id": "7"}', "finished:failed", 1),
        ('{"success": true, "run-id": "7"}', "finished:stopped", 1),
        ('{"success": false, "error-message": "no such setting"}', "", 1),
    ],
)
def test_run_sh_fails_where_the_run_does(
    tmp_path: Path, run: str, status: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Of Flower's commands none does: with these answers `flwr run --stream` returns 0."""
    listed = f'{{"runs": [{{"status": "{status}"}}]}}'
    flwr = tmp_path / "flwr"
    flwr.write_text(f"#!/bin/sh\ncase $1 in run) echo '{run}';; list) echo '{listed}';; log) echo told;; esac\n")
    flwr.chmod(0o700)
    monkeypatch.setattr("bcfl.deploy.launch.program", lambda name: str(tmp_path / name))
    monkeypatch.setattr(sys, "argv", ["launch", "../app", "-c", "experiment.rounds=3"])
    assert launch.main() == code
    said = capfd.readouterr()
    assert ("told" in said.out) == bool(status)
    assert bool(said.err) == bool(code)


def test_what_stops_a_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that Flower calls failed ends in one line that names the error, and the way on if it had begun."""
    for name in ("start_link", "register", "start_node"):
        monkeypatch.setattr(Federation, name, lambda *_: None)
    monkeypatch.setattr(Federation, "status", lambda self, run: "finished:failed")
    monkeypatch.setattr(Federation, "log", lambda self, run: "all well\nConnectionError: 1 of 3 clients are there\nbye")
    monkeypatch.setattr(Federation, "flwr", lambda self, *arguments: '{"run-id": 1}')
    reason, out = "finished:failed: ConnectionError: 1 of 3 clients are there", tmp_path / "a run"
    with pytest.raises(RunStoppedError, match=f"{reason}$"):
        run_local(CONFIG, 3, out, insecure=True)
    RunFolder.create(out, CONFIG.as_dict())
    with pytest.raises(RunStoppedError, match=f"{reason}; the same command with --out '{out}' goes on"):
        run_local(CONFIG, 3, out, insecure=True)
    refusal = '{"success": false, "error-message": "Invalid run configuration."}'
    monkeypatch.setattr(Federation, "flwr", lambda self, *arguments: refusal)
    with pytest.raises(RunStoppedError, match=r"flwr run failed: Invalid run configuration\."):
        Federation(Site(tmp_path, 1, insecure=True, gate_port=None)).submit("experiment.nonsense=1")


class Told(Observer):
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, float]] = []
        self.first_round = 0

    def started(self, config: Config, data: Any, first_round: int) -> None:
        self.first_round = first_round

    def round_done(self, record: dict[str, Any], seconds: float) -> None:
        self.rounds.append((record["round"], seconds))


def test_every_round_is_told_once_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server cuts the logs back to the last checkpoint first."""
    folder, told = RunFolder(tmp_path), Told()

    def write(name: str, number: int) -> None:
        folder.append(name, {"round": number, "seconds": number / 2})

    def cut_back() -> None:
        for path in tmp_path.iterdir():
            path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])

    write("rounds.jsonl", 1)
    write("timings.jsonl", 1)
    steps: list[Callable[[], None]] = [
        *(partial(write, name, 2) for name in ("rounds.jsonl", "timings.jsonl")),
        cut_back,
        *(partial(write, name, number) for number in (2, 3) for name in ("rounds.jsonl", "timings.jsonl")),
    ]
    monkeypatch.setattr("bcfl.deploy.processes.STATUS_EVERY", -1.0)
    monkeypatch.setattr(time, "sleep", lambda _: steps.pop(0)())
    monkeypatch.setattr(Federation, "status", lambda self, run: "running" if steps else "finished:completed")
    follow(Federation(Site(tmp_path, 1)), "1", CONFIG, tmp_path, [told])
    assert told.first_round == 2
    assert told.rounds == [(2, 1.0), (3, 1.5)]


def refuse_to_start(*_: object) -> None:
    pytest.fail("something was started")


def test_a_folder_that_cannot_take_the_run_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Federation, "start_link", refuse_to_start)
    monkeypatch.setattr("bcfl.deploy.processes.init", refuse_to_start)
    other_method = {**CONFIG.as_dict(), "method": {**CONFIG.as_dict()["method"], "name": "wecfl"}}
    other, complete, busy = tmp_path / "other", tmp_path / "complete", tmp_path / "busy"
    RunFolder.create(other, other_method)
    RunFolder.create(complete, CONFIG.as_dict()).write("result.json", {})
    with pytest.raises(ValueError, match=r'another run: method\.name is "wecfl" there, "fedavg" here'):
        run_local(CONFIG, 3, other, insecure=True)
    with pytest.raises(ValueError, match="already holds this run, complete"):
        run_local(CONFIG, 3, complete, insecure=True)
    with (
        RunFolder.create(busy, CONFIG.as_dict()).locked(),
        pytest.raises(ValueError, match="in use by another process"),
    ):
        run_local(CONFIG, 3, busy, insecure=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_removes_everything_and_names_the_way_on(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked twice, as by a terminal that closes: while it stops, a second request does not stop that."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = RunFolder.create(tmp_path / "run", CONFIG.as_dict()).path
    closed = []

    def close(federation: Federation) -> None:
        assert federation.site.folder.exists()
        os.kill(os.getpid(), number)
        closed.append(federation)

    monkeypatch.setattr(Federation, "start_link", lambda self: os.kill(os.getpid(), number))
    monkeypatch.setattr(Federation, "register", refuse_to_start)
    monkeypatch.setattr(Federation, "close", close)
    before = signal.signal(number, refuse_to_start)  # so that a signal nobody deals with does not end the tests
    try:
        with pytest.raises(KeyboardInterrupt, match=f"the same command with --out {out} goes on"):
            run_local(CONFIG, 3, out, insecure=True)
        assert signal.getsignal(number) is refuse_to_start
    finally:
        signal.signal(number, before)
    assert len(closed) == 1
    assert list(tmp_path.iterdir()) == [out]


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_link(federation: Federation) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        raise RunStoppedError("something else")

    monkeypatch.setattr(Federation, "start_link", start_link)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(RunStoppedError, match="something else"):
            run_local(CONFIG, 3, tmp_path / "run", insecure=True)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_processes_are_stopped_with_their_families_where_there_is_no_ps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has a session of its own, as Flower's have, and a name that looks like the end of one."""
    child = tmp_path / "child ) S 1"
    child.symlink_to(shutil.which("sleep") or "")
    family = f"import subprocess; print(subprocess.Popen([{str(child)!r}, '60'], start_new_session=True).pid, flush=1)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{family}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        monkeypatch.setenv("PATH", str(tmp_path))
        Federation(Site(tmp_path, 1), {"server": process}).close()
        assert process.returncode == -signal.SIGTERM
    end = time.monotonic() + 10
    while is_running(grandchild):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()  # one that has ended may wait to be noticed
    except OSError:
        return False


class Troublesome(subprocess.Popen[bytes]):
    """Cannot be asked to end; waiting for it is interrupted once."""

    trouble: list[BaseException]

    def send_signal(self, sig: int) -> None:
        if sig == signal.SIGTERM:
            raise PermissionError("no")
        super().send_signal(sig)

    def wait(self, timeout: float | None = None) -> int:
        if self.trouble:
            raise self.trouble.pop()
        return super().wait(timeout)


@pytest.mark.parametrize("trouble", [[], [KeyboardInterrupt("again")]])
def test_trouble_with_one_process_does_not_spare_the_others(
    tmp_path: Path, trouble: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcfl.deploy.processes.STOP_SECONDS", 0.2)
    sleep = [shutil.which("sleep") or "", "600"]
    processes = {"server": subprocess.Popen(sleep), "client-0": Troublesome(sleep), "client-1": subprocess.Popen(sleep)}
    processes["client-0"].trouble = list(trouble)  # type: ignore[attr-defined]
    federation = Federation(Site(tmp_path, 2), dict(processes))
    try:
        with pytest.raises(KeyboardInterrupt, match="again") if trouble else contextlib.nullcontext():
            federation.close()
        assert [process.returncode is not None for process in processes.values()] == [True] * 3
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
