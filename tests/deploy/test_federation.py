"""Federations of real processes that fail, come back and are refused."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from bcfl.deploy.folder import Site, init
from bcfl.deploy.processes import Federation, follow, free_ports
from bcfl.engines.flower import Terms
from bcfl.runs.loop import load_result, start
from bcfl.runs.problem import Given
from bcfl.runs.result import Result
from bcfl.runs.settings import Config, load_config
from bcfl.runs.store import RunFolder

ROOT = Path(__file__).parent.parent.parent


NUM_CLIENTS = 3
CLONE_NEWNET = 0x40000000


@pytest.fixture(scope="module")
def loopback_only() -> Iterator[bool]:
    """Whether what is started from here on has no network but loopback, in a namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET) != 0:
            yield False
            return
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield True
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0


def settings_of(method: str, rounds: int = 3, joins: str = "[]") -> Config:
    """Rotated digits; tested only in the end, because every message is a new process that must load torch."""
    overrides = ["data.partition=feature(3,1)", "data.rotations=[0, 90, 180]", "method.num_clusters=3"]
    more = [f"method.name={method}", f"experiment.rounds={rounds}", f"experiment.evaluate_every={rounds}"]
    more += [f"experiment.joins={joins}", "training.local_steps=5", "experiment.together=1"]
    return load_config(None, [*overrides, *more], compared=["bcfl-g"])


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, loopback_only: bool) -> Iterator[Federation]:
    """A SuperLink and registered clients with TLS and keys, for all tests below."""
    folder = tmp_path_factory.mktemp("real") / "federation"
    ports = free_ports(NUM_CLIENTS + 1)
    site = Site(folder, NUM_CLIENTS, "127.0.0.1", ports[0], None, tuple(ports[1:]))
    init(site, settings_of("bcfl-mh-3"), asdict(Terms(NUM_CLIENTS, wait=120.0, deadline=120.0)))
    with Federation(site) as running:
        running.start_link()
        running.register()
        for index in range(NUM_CLIENTS):
            running.start_node(index)
        yield running
    leftover = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout.split()
    assert leftover == []


def submit(federation: Federation, method: str, rounds: int, out: Path, joins: str = "[]", **deploy: Any) -> str:
    changes = {"method.name": method, "experiment.rounds": rounds, "experiment.evaluate_every": rounds}
    changes["experiment.joins"] = joins
    changes |= {"deploy.out": str(out), **{f"deploy.{key}": value for key, value in deploy.items()}}
    return federation.submit(*(f"{k}={v!r}".replace("'", '"') for k, v in changes.items()))


def assert_same(result: Result, expected: Result) -> None:
    assert torch.equal(result.state.assignment, expected.state.assignment)
    assert torch.allclose(result.state.models.mean, expected.state.models.mean, rtol=1e-4, atol=1e-6)
    assert torch.allclose(result.state.models.precision, expected.state.models.precision, rtol=1e-3, atol=1e-4)


def wait_for(ready: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_tutorial_leads_from_an_empty_folder_to_the_simulators_numbers(
    tmp_path: Path, loopback_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shell blocks of docs/flower.md as written: TLS, keys, gate, three clients with their own data, BCFL-MH."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "flower.md").read_text(), re.S | re.M)
    script = "set -eu\n" + "\n".join(blocks)
    (tmp_path / "tutorial.sh").write_text(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (tmp_path / "out.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "tutorial.sh"],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the processes that it leaves running are stopped as a group
        )
    try:
        code = process.wait(500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        time.sleep(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (tmp_path / "out.log").read_text()[-2000:]
    result = load_result(tmp_path / "federation" / "server" / "run")
    clients = []
    for index in range(3):
        module: dict[str, Any] = {}
        exec((tmp_path / "federation" / f"client-{index}" / "mydata.py").read_text(), module)
        clients.append(module["load"]())
    monkeypatch.chdir(tmp_path)
    config, alone = result.config, replace(result.config.experiment, together=1)  # as every node trains
    config = replace(config, data=replace(config.data, factory=None), experiment=alone)
    assert_same(result, start(config, None, given=Given(clients)))


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(federation: Federation, tmp_path: Path) -> None:
    """The SuperLink is killed after the first round; restarted on its data base, a new run goes on from there."""
    out = tmp_path / "run"
    run = submit(federation, "bcfl-g", 2, out)
    wait_for(lambda: len(RunFolder(out).lines("rounds.jsonl")) >= 2, 300)  # round 0 and round 1
    federation.stop("server", signal.SIGKILL)
    federation.start_link()
    assert federation.status(run) != "finished:completed"
    kept = (out / "checkpoints" / "round-000001.safetensors").stat().st_mtime_ns
    again = submit(federation, "bcfl-g", 2, out)
    follow(federation, again, settings_of("bcfl-g", 2), out)
    assert (out / "checkpoints" / "round-000001.safetensors").stat().st_mtime_ns == kept  # not done again
    assert_same(load_result(out), start(settings_of("bcfl-g", 2), None))


@pytest.mark.slow
def test_strangers_are_refused_and_a_killed_client_does_not_stop_the_run(
    federation: Federation, tmp_path: Path
) -> None:
    site = federation.site
    stranger = replace(site, folder=tmp_path / "stranger")
    init(stranger, settings_of("bcfl-g"), {})
    shutil.copy(site.folder / "ca.crt", stranger.client(0) / "ca.crt")  # knows the server, but is not registered
    with Federation(replace(stranger, node_ports=tuple(free_ports(NUM_CLIENTS)))) as others:
        others.start_node(0)
        others.start_node(1)  # trusts only its own authority, which did not sign the server's certificate
        out = tmp_path / "run"
        run = submit(federation, "bcfl-g", 2, out, deadline=60.0)
        wait_for(lambda: len(RunFolder(out).lines("rounds.jsonl")) >= 1, 300)  # the clients are met
        time.sleep(2)
        federation.stop("client-2", signal.SIGKILL)
        follow(federation, run, settings_of("bcfl-g", 2), out)
        records = RunFolder(out).lines("rounds.jsonl")
        assert [record["work"]["trainings"] for record in records[1:]] == [2, 2]
        assert others.processes["client-0"].wait(60) != 0
        assert "certificate" in (stranger.client(1) / "log.txt").read_text().lower()
        assert len(re.findall(r"round 1, train\.fit, client 2: ", federation.log(run))) == 1
    federation.start_node(2)


@pytest.mark.slow
def test_a_client_that_starts_late_joins_the_running_federation(federation: Federation, tmp_path: Path) -> None:
    """Announced for round 2 and waited for, since all who have joined must answer: the simulator's numbers."""
    federation.stop("client-2")
    out, joins = tmp_path / "run", "[[2,2]]"
    run = submit(federation, "bcfl-g", 2, out, joins=joins, min_share=1.0)
    wait_for(lambda: len(RunFolder(out).lines("rounds.jsonl")) >= 2, 300)  # round 1 is over
    federation.start_node(2)
    follow(federation, run, settings_of("bcfl-g", 2), out)
    records = RunFolder(out).lines("rounds.jsonl")
    assert [record["work"]["trainings"] for record in records[1:]] == [2, 3]
    placed = [story["assignment"][0][2] for story in RunFolder(out).lines("associations.jsonl")]
    assert placed[0] == -1
    assert placed[1] >= 0
    assert_same(load_result(out), start(settings_of("bcfl-g", 2, joins), None))


@pytest.mark.slow
def test_none_of_this_needed_any_network_but_loopback(federation: Federation, loopback_only: bool) -> None:
    if not loopback_only:
        pytest.skip("a network namespace needs privileges")
    process = federation.processes["server"].pid
    interfaces = Path(f"/proc/{process}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
