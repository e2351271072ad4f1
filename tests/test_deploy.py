"""`bcfl deploy`: the folder it writes, the gate, and real processes that fail, come back and are refused."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from bcfl.cli import main
from bcfl.deploy import launch
from bcfl.deploy.app import read_run_config
from bcfl.deploy.folder import LOCKED_DOWN, Site, gate_command, init, link_command, node_command, run_config
from bcfl.deploy.processes import Federation, follow, free_ports, run_local
from bcfl.deploy.terms import read_settings
from bcfl.engines.flower import Terms
from bcfl.runs.loop import load_result, start
from bcfl.runs.observers import Observer
from bcfl.runs.result import Result
from bcfl.runs.settings import Config, load_config
from bcfl.runs.stopping import RunStoppedError
from bcfl.runs.store import RunFolder

ROOT = Path(__file__).parent.parent
needs_tools = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl and ssh-keygen make the keys"
)

# ---- the folder -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "federation"
    arguments = ["deploy", "init", str(folder), "--clients", "3", "--server", "fl.example.org"]
    assert (
        main([*arguments, "--set", "deploy.deadline=77", "--data-factory", "mydata:load", "--set", "model.name=mlp"])
        == 0
    )
    return folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data-factory", "mydata", "--set", "model.name=mlp"], "must be package.module:function, got 'mydata'"),
        (["--set", "model.factory=<lambda>"], "model.factory must be package.module:function, got '<lambda>'"),
        (["--set", "data.factory=given in Python"], "data.factory must be package.module:function"),
        (["--set", "model.factory=math:lin"], "model.factory 'math:lin' cannot be imported"),
        (["--set", "model.factory=math:pi"], "model.factory 'math:pi' must be a function"),
        (["--data-factory", 'x" y:z', "--set", "model.name=mlp"], "must be package.module:function"),
        (["--data-factory", "mydata:load"], "model.name or model.factory must be given for these data"),
    ],
)
def test_what_clients_could_never_import_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    where = ["deploy", "init", str(tmp_path / "federation"), "--insecure"]
    assert main([*where, "--clients", "3", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "federation").exists()


def test_a_function_that_only_other_machines_have_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "model.factory=mymodel:network"]
    assert main(["deploy", "init", str(tmp_path / "a"), "--insecure", "--data-factory", "mydata:load", *settings]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "model.factory mymodel:network is not on this machine" in told
    assert "--data-factory mydata:load is not on this machine" in told
    assert main(["deploy", "local", "--insecure", *settings]) == 2
    assert "model.factory 'mymodel:network': no such module is on this machine" in capsys.readouterr().err


def test_the_servers_name_must_be_given_unless_all_is_local(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "init", str(tmp_path / "a")]) == 2
    assert "--server must be given" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@needs_tools
def test_the_folder_has_every_role_and_its_secrets_are_for_their_owner_alone(written: Path) -> None:
    for name in ("server/start.sh", "server/gate.sh", "server/register.sh", "server/run.sh", "client-2/start.sh"):
        assert os.access(written / name, os.X_OK)
        assert subprocess.run(["sh", "-n", written / name], check=False).returncode == 0
    secret = {path for path in written.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()}
    expected = {"ca.key", "server/certificates/server.key", *(f"client-{i}/node" for i in range(3))}
    assert {str(path.relative_to(written)) for path in secret} == expected
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)


def told_of(certificate: Path, *what: str) -> str:
    command = ["openssl", "x509", "-in", certificate, "-noout", *what]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_tools
def test_the_servers_certificate_is_signed_by_the_federations_authority(written: Path) -> None:
    certificates = written / "server" / "certificates"
    check = ["openssl", "verify", "-x509_strict", "-CAfile", written / "ca.crt", certificates / "server.crt"]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    shown = told_of(certificates / "server.crt", "-ext", "subjectAltName")
    assert "DNS:fl.example.org" in shown


@needs_tools
def test_tls_and_node_authentication_are_on_and_the_control_interface_stays_on_loopback(written: Path) -> None:
    server, client = (written / "server" / "start.sh").read_text(), (written / "client-1" / "start.sh").read_text()
    assert "--enable-supernode-auth" in server
    assert "--ssl-certfile" in server
    assert "--host 127.0.0.1" in server
    assert "--superlink fl.example.org:9093" in client
    assert "--root-certificates ca.crt --auth-supernode-private-key node" in client
    assert 'data-factory="mydata:load"' in client
    for script in (server, client):
        assert "--insecure" not in script
        assert all(f"export {name}=" in script for name in LOCKED_DOWN)


@needs_tools
def test_the_apps_settings_are_the_runs(written: Path) -> None:
    from flwr.common.config import flatten_dict

    app = tomllib.loads((written / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config, terms, out = read_run_config(flatten_dict(app["config"]))
    expected, _ = read_settings(None, ["model.name=mlp"], 3)
    assert (config, terms.num_clients, terms.deadline, out) == (expected, 3, 77.0, Path("run"))
    assert {"experiment.joins", "method.racing", "deploy.min_share"} <= flatten_dict(app["config"]).keys()


def test_settings_with_any_character_are_written_as_they_are(tmp_path: Path) -> None:
    path = "".join(map(chr, range(128))) + "ä€😀"
    config, terms = read_settings(None, [], 4)
    config = replace(config, data=replace(config.data, path=path))
    init(Site(tmp_path / "a", 4, gate_port=None, insecure=True), config, terms)
    app = tomllib.loads((tmp_path / "a" / "app" / "pyproject.toml").read_bytes().decode())
    assert app["tool"]["flwr"]["app"]["config"]["data"]["path"] == path


@needs_tools
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_the_units_are_sound(written: Path) -> None:
    units = [written / "server" / f"bcfl-{what}.service" for what in ("server", "gate")]
    units.append(written / "client-0" / "bcfl-client.service")
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "bcfl-" in line and "is not executable" not in line]
    assert complaints == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["deploy", "init", str(tmp_path), "--insecure"]) == 2
    assert "already holds something" in capsys.readouterr().err


def test_without_the_tools_for_keys_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    write_program(programs / "openssl", "exit 0")
    monkeypatch.setenv("PATH", str(programs))
    assert main(["deploy", "init", str(tmp_path / "a"), "--server", "localhost"]) == 2
    assert "but ssh-keygen cannot be found" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("was_there", [False, True])
def test_what_fails_half_way_leaves_no_key_and_can_be_tried_again(
    tmp_path: Path, was_there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "a"
    programs.mkdir()
    if was_there:
        folder.mkdir()
    write_program(programs / "openssl", "exit 0")
    write_program(programs / "ssh-keygen", 'echo "no entropy" >&2; exit 1')
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr("bcfl.deploy.folder._make_certificates", lambda site: (site.folder / "ca.key").write_text("x"))
    for _ in range(2):
        assert main(["deploy", "init", str(folder), "--server", "localhost"]) == 2
        assert "ssh-keygen failed: no entropy" in capsys.readouterr().err
        assert folder.exists() == was_there
        assert not was_there or list(folder.iterdir()) == []


def write_program(path: Path, commands: str) -> None:
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o700)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--port", "99999", "--server", "a"], "--port must be from 1 to 65535, got 99999"),
        (["--port", "9092", "--server", "a"], "--port 9092 is the SuperLink's own"),
        (["--port", "9093", "--insecure"], "--insecure goes without a gate"),
    ],
)
def test_a_port_that_cannot_be_the_gates_is_refused(
    tmp_path: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "init", str(tmp_path / "a"), *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "server",
    [
        *("", "bad host", "fl.example.org:9093", "https://fl.example.org", "fl.example.org.", "fl..org", "-fl.org"),
        *("fl.exämple.org", "300.1.1.1", "[2001:db8::7]", "fe80::1%eth0", "fl.example.org\n", f"{'a' * 64}.org"),
    ],
)
def test_what_is_no_host_name_and_no_address_is_refused(
    tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "init", str(tmp_path / "a"), f"--server={server}"]) == 2
    assert "--server must be a host name such as fl.example.org or an IP address" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("server", ["localhost", "10.0.0.7", "node-1", "fl_1", "3com.ORG", "xn--exmple-cua.org"])
def test_a_server_is_reached_by_its_name_or_address(tmp_path: Path, server: str) -> None:
    site = Site(tmp_path, 1, server)
    assert f"{server}:9093" in node_command(site, 0)
    assert "--host" not in gate_command(site)


@needs_tools
def test_a_server_with_an_ipv6_address_listens_there_and_is_certified_for_it(tmp_path: Path) -> None:
    assert main(["deploy", "init", str(tmp_path / "a"), "--clients", "2", "--server", "2001:db8::7"]) == 0
    assert "--superlink '[2001:db8::7]:9093'" in (tmp_path / "a" / "client-0" / "start.sh").read_text()
    assert "bcfl.deploy.gate --host :: --port 9093" in (tmp_path / "a" / "server" / "gate.sh").read_text()
    certificate = tmp_path / "a" / "server" / "certificates" / "server.crt"
    assert "does match certificate" in told_of(certificate, "-checkip", "2001:db8::7")


def test_insecure_is_refused_beyond_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["deploy", "init", str(tmp_path / "a"), "--insecure"]
    for server in ("fl.example.org", "::1"):  # the SuperLink does not listen on the second
        assert main([*arguments, "--server", server]) == 2
        assert "--insecure is for this machine alone" in capsys.readouterr().err
        assert not (tmp_path / "a").exists()
    assert main(arguments) == 0
    assert "--insecure" in (tmp_path / "a" / "client-0" / "start.sh").read_text()
    assert not (tmp_path / "a" / "server" / "gate.sh").exists()


def test_no_command_of_ours_holds_a_secret(tmp_path: Path) -> None:
    site = Site(tmp_path, 1)
    for command in (link_command(site), gate_command(site), node_command(site, 0)):
        assert not re.search(r"token|secret|password|BEGIN", " ".join(command), re.I)


@pytest.mark.parametrize(
    ("clients", "partition", "clusters"),
    [
        (8, "feature(4,2)", 4),
        (6, "feature(3,2)", 3),
        (4, "feature(2,2)", 2),
        (3, "feature(3,1)", 3),
        (2, "feature(2,1)", 2),
        (5, "label(0,5,0.5)", 2),
    ],
)
def test_what_is_left_open_suits_the_number_of_clients(clients: int, partition: str, clusters: int) -> None:
    config, terms = read_settings(None, [], clients)
    assert (config.data.partition, config.method["num_clusters"]) == (partition, clusters)
    assert terms["num_clients"] == clients


def test_the_number_of_clients_may_be_set_like_any_other_setting(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    assert main(["deploy", "init", str(folder), "--set", "deploy.num_clients=3", "--insecure"]) == 0
    assert len(list(folder.glob("client-*"))) == 3
    assert "deploy.num_clients = 3\n" in (folder / "app" / "pyproject.toml").read_text()
    config, terms = read_settings(None, ["deploy.num_clients=6"], None)
    assert (config.data.partition, terms["num_clients"]) == ("feature(3,2)", 6)
    assert read_settings(None, ["deploy.num_clients=6"], 6) == (config, terms)
    assert read_settings(None, [], None)[1]["num_clients"] == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("7", "deploy.num_clients is 7, but --clients says 3: give only one of them"),
        ("3.0", r"deploy\.num_clients must be a whole number"),
    ],
)
def test_a_number_of_clients_that_contradicts_or_is_none_is_refused(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(None, [f"deploy.num_clients={value}"], 3)


def test_rotations_that_were_asked_for_are_kept() -> None:
    config, _ = read_settings(None, ["data.rotations=[0,180]"], 4)
    assert config.data.rotations == (0, 180)
    assert (config.data.partition, config.method["num_clusters"]) == ("feature(2,2)", 2)
    with pytest.raises(ValueError, match=r"data\.rotations must be as many as divide 4 clients evenly"):
        read_settings(None, ["data.rotations=[0,90,180]"], 4)
    with pytest.raises(ValueError, match=r"data\.rotations must be a list"):
        read_settings(None, ["data.rotations=3"], 4)


@pytest.mark.parametrize("section", ["data", "deploy", "method", "experiment"])
def test_a_section_that_is_none_is_named(tmp_path: Path, section: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f"{section} = 3\n")
    with pytest.raises(ValueError, match=f"^{section} must be a section of settings, got 3$"):
        read_settings(path, [], 4)


@pytest.mark.parametrize("overrides", [[], ["method.temperature=none"], ["method.stay=none", "method.temperature=2.0"]])
def test_settings_reach_the_server_as_they_are(overrides: list[str]) -> None:
    """Of what is written as "none", some means nothing (data.path) and some is a choice (method.temperature)."""
    config, terms = read_settings(None, overrides, 4)
    assert read_run_config(run_config(config, terms))[0] == config


def test_settings_that_do_not_fit_the_clients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'feature\(4,5\)' makes 20 clients, the federation has 3 \(--clients\)"):
        read_settings(None, ["data.partition=feature(4,5)"], 3)
    with pytest.raises(ValueError, match=r"'label\(0,5,0\.5\)' makes 5 clients, the federation has 3 \(--clients\)"):
        read_settings(None, ["data.partition=label(0, 5, 0.5)"], 3)
    with pytest.raises(ValueError, match=r"partition 'feature\(3\)' is not one of"):
        read_settings(None, ["data.partition=feature(3)"], 3)
    read_settings(None, ["data.partition=file", "data.partition_file=split.npz"], 4)  # which knows how many it makes
    with pytest.raises(ValueError, match=r"method\.num_clusters is 7, but there are only 3 clients"):
        read_settings(None, ["method.num_clusters=7"], 3)
    with pytest.raises(ValueError, match=r"experiment\.joins names client 9, but the clients are 0 to 2"):
        read_settings(None, ["experiment.joins=[[9, 2]]"], 3)
    with pytest.raises(ValueError, match=r"600 hypotheses .* allow only 16"):
        read_settings(None, ["method.name=bcfl-mh-600"], 4)
    with pytest.raises(ValueError, match=r"deploy\.min_share must be in"):
        read_settings(None, ["deploy.min_share=2.0"], 3)
    with pytest.raises(ValueError, match=r"did you mean deploy\.deadline"):
        read_settings(None, ["deploy.deadlin=2.0"], 3)


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
    write_program(tmp_path / "flwr", f"case $1 in run) echo '{run}';; list) echo '{listed}';; log) echo told;; esac")
    monkeypatch.setattr("bcfl.deploy.launch.program", lambda name: str(tmp_path / name))
    monkeypatch.setattr(sys, "argv", ["launch", "../app", "-c", "experiment.rounds=3"])
    assert launch.main() == code
    said = capfd.readouterr()
    assert ("told" in said.out) == bool(status)
    assert bool(said.err) == bool(code)


# ---- real processes -------------------------------------------------------------------------------------------------

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
    return load_config(
        None, [*overrides, *more, f"experiment.joins={joins}", "training.local_steps=5"], compared=["bcfl-g"]
    )


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
@needs_tools
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
    assert_same(
        result, start(replace(result.config, data=replace(result.config.data, factory=None)), None, clients=clients)
    )


@pytest.mark.slow
@needs_tools
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
@needs_tools
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
@needs_tools
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
@needs_tools
def test_none_of_this_needed_any_network_but_loopback(federation: Federation, loopback_only: bool) -> None:
    if not loopback_only:
        pytest.skip("a network namespace needs privileges")
    process = federation.processes["server"].pid
    interfaces = Path(f"/proc/{process}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]


# ---- stopping, without a federation ----------------------------------------------------------------------------------


def test_what_stops_a_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that Flower calls failed ends in one line that names the error, and the way on if it had begun."""
    for name in ("start_link", "register", "start_node"):
        monkeypatch.setattr(Federation, name, lambda *_: None)
    monkeypatch.setattr(Federation, "status", lambda self, run: "finished:failed")
    monkeypatch.setattr(Federation, "log", lambda self, run: "all well\nConnectionError: 1 of 3 clients are there\nbye")
    monkeypatch.setattr(Federation, "flwr", lambda self, *arguments: '{"run-id": 1}')
    reason, out = "finished:failed: ConnectionError: 1 of 3 clients are there", tmp_path / "a run"
    with pytest.raises(RunStoppedError, match=f"{reason}$"):
        run_local(settings_of("fedavg"), 3, out, insecure=True)
    RunFolder.create(out, settings_of("fedavg").as_dict())
    with pytest.raises(RunStoppedError, match=f"{reason}; the same command with --out '{out}' goes on"):
        run_local(settings_of("fedavg"), 3, out, insecure=True)
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
    follow(Federation(Site(tmp_path, 1)), "1", settings_of("fedavg"), tmp_path, [told])
    assert told.first_round == 2
    assert told.rounds == [(2, 1.0), (3, 1.5)]


def refuse_to_start(*_: object) -> None:
    pytest.fail("something was started")


def test_a_folder_that_cannot_take_the_run_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Federation, "start_link", refuse_to_start)
    monkeypatch.setattr("bcfl.deploy.processes.init", refuse_to_start)
    config = settings_of("fedavg")
    other, complete, busy = tmp_path / "other", tmp_path / "complete", tmp_path / "busy"
    RunFolder.create(other, settings_of("bcfl-g").as_dict())
    RunFolder.create(complete, config.as_dict()).write("result.json", {})
    with pytest.raises(ValueError, match=r'another run: method\.name is "bcfl-g" there, "fedavg" here'):
        run_local(config, 3, other, insecure=True)
    with pytest.raises(ValueError, match="already holds this run, complete"):
        run_local(config, 3, complete, insecure=True)
    with (
        RunFolder.create(busy, config.as_dict()).locked(),
        pytest.raises(ValueError, match="in use by another process"),
    ):
        run_local(config, 3, busy, insecure=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_removes_everything_and_names_the_way_on(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked twice, as by a terminal that closes: while it stops, a second request does not stop that."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = RunFolder.create(tmp_path / "run", settings_of("fedavg").as_dict()).path
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
            run_local(settings_of("fedavg"), 3, out, insecure=True)
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
            run_local(settings_of("fedavg"), 3, tmp_path / "run", insecure=True)
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
    wait_for(lambda: not is_running(grandchild), 10)


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
