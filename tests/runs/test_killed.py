"""Runs that are killed, at any moment, and resumed end exactly as if nothing had happened."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from small_runs import (
    FEDERATIONS,
    before_every_step,
    command,
    die_before_step,
    die_while_appending,
    die_while_writing,
    outcome,
    small_config,
)

from bcfl.cli import main
from bcfl.runs.loop import resume, start

pytestmark = pytest.mark.slow

# Processes forked from one that has imported all that a run needs: real processes, but started in no time.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["bcfl.cli.summary", "bcfl.runs.loop", "sklearn.datasets", "sklearn.metrics"])


def begin(target: Callable[..., Any], *arguments: Any) -> Any:
    process = processes.Process(target=target, args=arguments)
    process.start()
    return process


def killed(target: Callable[..., Any], *arguments: Any) -> bool:
    process = begin(target, *arguments)
    process.join(120)
    return bool(process.exitcode == -signal.SIGKILL)


@cache
def never_stopped(federation: str) -> tuple[dict[str, Any], int]:
    """What an uninterrupted run of the federation gives, and in how many steps on the disk."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        numbers = before_every_step(lambda number: None, patch.setattr)
        start(small_config(*FEDERATIONS[federation]), Path(folder) / "run", num_workers=2)
        return outcome(Path(folder) / "run"), next(numbers)


def go_on(path: Path, federation: str) -> None:
    """Resume what a kill left; where not even the settings were written, begin again in the same folder."""
    if (path / "config.json").exists():
        resume(path, num_workers=1)
    else:
        assert main(command(path, *FEDERATIONS[federation])) == 0


@pytest.mark.parametrize("federation", FEDERATIONS)
def test_killed_between_any_two_steps_on_the_disk(
    tmp_path: Path, federation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, num_steps = never_stopped(federation)
    # Together the federations see every moment.
    moments = range(list(FEDERATIONS).index(federation), num_steps, len(FEDERATIONS))
    assert len(moments) >= 5
    for moment in moments:
        path = tmp_path / str(moment)
        assert killed(die_before_step, command(path, *FEDERATIONS[federation]), moment), moment
        assert not (path / "result.json").exists() or moment >= num_steps - 2
        go_on(path, federation)
        assert outcome(path) == expected, moment


@pytest.mark.parametrize("federation", FEDERATIONS)
def test_killed_while_a_checkpoint_is_being_written_and_again_while_resuming(tmp_path: Path, federation: str) -> None:
    expected, _ = never_stopped(federation)
    path, checkpoint = tmp_path / "run", "round-000002.safetensors"
    assert killed(die_while_writing, command(path, *FEDERATIONS[federation]), checkpoint)
    assert (path / "checkpoints" / f"{checkpoint}.tmp").exists()
    assert killed(die_while_writing, ["resume", str(path), "--quiet"], "round-000003.safetensors")
    assert killed(die_before_step, ["resume", str(path), "--quiet"], 0)
    resume(path, num_workers=2)
    assert outcome(path) == expected
    assert not list(path.rglob("*.tmp"))


@pytest.mark.parametrize("file_name", ["config.json", "environment.json", "manifest.json", "result.json"])
def test_killed_while_another_file_is_being_written(
    tmp_path: Path, file_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = never_stopped("plain")
    path = tmp_path / "run"
    assert killed(die_while_writing, command(path), file_name)
    go_on(path, "plain")
    assert outcome(path) == expected


@pytest.mark.parametrize(("name", "line"), [("rounds.jsonl", 0), ("rounds.jsonl", 2), ("associations.jsonl", 1)])
def test_killed_in_the_middle_of_a_line(tmp_path: Path, name: str, line: int) -> None:
    expected, _ = never_stopped("plain")
    path = tmp_path / "run"
    assert killed(die_while_appending, command(path), name, line)
    resume(path)
    assert outcome(path) == expected


@pytest.mark.parametrize("federation", FEDERATIONS)
def test_killed_at_random_moments_until_it_is_through(tmp_path: Path, federation: str) -> None:
    expected, _ = never_stopped(federation)
    path = tmp_path / "run"
    draws = random.Random(federation)
    arguments, kills = command(path, *FEDERATIONS[federation]), 0
    for patience in range(1, 40):
        process = begin(main, arguments)
        while not (path / "config.json").exists() and process.is_alive():
            time.sleep(0.002)
        process.join(draws.uniform(0, 0.1 * 1.25**patience))  # ever longer: it ends, however busy the machine is
        if process.exitcode == 0:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        arguments = ["resume", str(path), "--quiet"]
    assert kills >= 1
    assert outcome(path) == expected


def test_killed_and_resumed_as_users_do(tmp_path: Path) -> None:
    expected, _ = never_stopped("plain")
    path = tmp_path / "run"
    shell = [sys.executable, "-m", "bcfl"]
    run = subprocess.Popen([*shell, *command(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (path / "checkpoints" / "round-000000.safetensors").exists():
        assert run.poll() is None
        time.sleep(0.002)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    last = sorted((path / "checkpoints").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    again = subprocess.run([*shell, "resume", str(path), "--quiet", "--json"], capture_output=True, text=True)
    assert again.returncode == 0
    assert f"{last.name} is damaged" in again.stderr  # told even when it should be quiet
    assert again.stderr.splitlines()[-1].startswith(("going on from round", "starting again from round 0"))
    assert again.stdout.startswith('{"method": "bcfl-mh-3"')
    assert outcome(path) == expected
