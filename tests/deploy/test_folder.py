"""The folder that `bcfl deploy init` writes: who gets what, which keys, and what is refused at once."""

import os
import ssl
import stat
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import pytest

pytest.importorskip("flwr")

from bcfl.cli import main
from bcfl.deploy.app import read_run_config
from bcfl.deploy.folder import LOCKED_DOWN, Site, gate_command, init, node_command
from bcfl.deploy.terms import read_settings


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "federation"
    arguments = ["deploy", "init", str(folder), "--clients", "3", "--server", "fl.example.org"]
    settings = ["--set", "deploy.deadline=77", "--set", "model.name=mlp", "--data-factory", "mydata:load"]
    assert main([*arguments, *settings]) == 0
    return folder


def test_every_role_has_its_scripts_and_secrets_are_for_their_owner_alone(written: Path) -> None:
    for name in ("server/start.sh", "server/gate.sh", "server/register.sh", "server/run.sh", "client-2/start.sh"):
        assert os.access(written / name, os.X_OK)
        assert subprocess.run(["sh", "-n", written / name], check=False).returncode == 0
    secret = {path for path in written.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()}
    expected = {"ca.key", "server/certificates/server.key", *(f"client-{i}/node" for i in range(3))}
    assert {str(path.relative_to(written)) for path in secret} == expected
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)


def is_trusted(folder: Path, name: str) -> bool:
    """Whether a client of this federation takes the server by that name for its own."""
    trust = ssl.create_default_context(cafile=folder / "client-0" / "ca.crt")
    trust.verify_flags |= ssl.VERIFY_X509_STRICT
    certificates = folder / "server" / "certificates"
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server, client = tls.wrap_bio(there, back, server_side=True), trust.wrap_bio(back, there, server_hostname=name)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError:
            return False
    return True


def test_the_servers_certificate_is_signed_by_the_federations_authority_for_its_name(written: Path) -> None:
    assert [is_trusted(written, name) for name in ("fl.example.org", "127.0.0.1", "other.org")] == [True, True, False]


def test_flower_takes_the_keys_of_nodes(written: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    key = load_ssh_private_key((written / "client-1" / "node").read_bytes(), None)
    assert key.public_key() == load_ssh_public_key((written / "server" / "nodes" / "client-1.pub").read_bytes())


def test_tls_and_node_authentication_are_on_and_the_control_interface_stays_on_loopback(written: Path) -> None:
    server, client = (written / "server" / "start.sh").read_text(), (written / "client-1" / "start.sh").read_text()
    for option in ("--enable-supernode-auth", "--ssl-certfile", "--host 127.0.0.1"):
        assert option in server
    assert "--superlink fl.example.org:9093" in client
    assert "--root-certificates ca.crt --auth-supernode-private-key node" in client
    assert 'data-factory="mydata:load"' in client
    for script in (server, client):
        assert "--insecure" not in script
        assert all(f"export {name}=" in script for name in LOCKED_DOWN)


def settings_in(folder: Path) -> dict[str, Any]:
    app = tomllib.loads((folder / "app" / "pyproject.toml").read_bytes().decode())
    config: dict[str, Any] = app["tool"]["flwr"]["app"]["config"]
    return config


def test_the_apps_settings_are_the_runs(written: Path) -> None:
    from flwr.common.config import flatten_dict

    flat = flatten_dict(settings_in(written))
    config, terms, out = read_run_config(flat)
    expected, _ = read_settings(None, ["model.name=mlp"], 3)
    assert (config, terms.num_clients, terms.deadline, out) == (expected, 3, 77.0, Path("run"))
    assert {"experiment.joins", "method.racing", "deploy.min_share"} <= flat.keys()


def test_settings_with_any_character_are_written_as_they_are(tmp_path: Path) -> None:
    path = "".join(map(chr, range(128))) + "ä€😀{{ site }}{% if %}"
    config, terms = read_settings(None, [], 4)
    config = replace(config, data=replace(config.data, path=path))
    init(Site(tmp_path / "a", 4, gate_port=None, insecure=True), config, terms)
    assert settings_in(tmp_path / "a")["data"]["path"] == path


@pytest.mark.skipif(which("systemd-analyze") is None, reason="needs systemd")
def test_the_units_are_sound(written: Path) -> None:
    units = [*(written / "server").glob("*.service"), written / "client-0" / "bcfl-client.service"]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "bcfl-" in line and "is not executable" not in line]
    assert (len(units), complaints) == (3, [])


@pytest.mark.parametrize("was_there", [False, True])
def test_what_fails_half_way_leaves_no_key_and_can_be_tried_again(
    tmp_path: Path, was_there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        assert (folder / "ca.key").exists()
        raise OSError("no room")

    folder = tmp_path / "a"
    if was_there:
        folder.mkdir()
    monkeypatch.setattr("bcfl.deploy.folder.make_node_key", fail)
    for _ in range(2):
        assert main(["deploy", "init", str(folder), "--server", "localhost"]) != 0
        assert "no room" in capsys.readouterr().err
        assert folder.exists() == was_there
        assert not was_there or list(folder.iterdir()) == []


BAD_HOSTS = (
    *("", "bad host", "fl.example.org:9093", "https://fl.example.org", "fl.example.org.", "fl..org", "-fl.org"),
    *("fl.exämple.org", "300.1.1.1", "[2001:db8::7]", "fe80::1%eth0", "fl.example.org\n", f"{'a' * 64}.org"),
)
LOCAL = "--server=localhost"
OF_DATA = ["--data-factory", "mydata:load"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--server must be given"),
        *(([f"--server={host}"], "--server must be a host name such as fl.example.org or an IP") for host in BAD_HOSTS),
        ([LOCAL, "--port", "99999"], "--port must be from 1 to 65535, got 99999"),
        ([LOCAL, "--port", "9092"], "--port 9092 is the SuperLink's own"),
        (["--insecure", "--port", "9093"], "--insecure goes without a gate"),
        (["--insecure", "--server=fl.example.org"], "--insecure is for this machine alone"),
        (["--insecure", "--server=::1"], "--insecure is for this machine alone"),  # where the SuperLink does not listen
        ([LOCAL, *OF_DATA], "model.name or model.factory must be given for these data"),
        ([LOCAL, "--set", "model.name=mlp", "--data-factory", "mydata"], "must be package.module:function, got 'myd"),
        ([LOCAL, "--set", "model.name=mlp", "--data-factory", 'x" y:z'], "must be package.module:function"),
        ([LOCAL, "--set", "model.factory=<lambda>"], "model.factory must be package.module:function, got '<lambda>'"),
        ([LOCAL, "--set", "data.factory=given in Python"], "data.factory must be package.module:function"),
        ([LOCAL, "--set", "model.factory=math:lin"], "model.factory 'math:lin' cannot be imported"),
        ([LOCAL, "--set", "model.factory=math:pi"], "model.factory 'math:pi' must be a function"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "init", str(tmp_path / "a"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").touch()
    assert main(["deploy", "init", str(tmp_path), "--insecure"]) == 2
    assert "already holds something" in capsys.readouterr().err


def test_a_function_that_only_other_machines_have_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "model.factory=mymodel:network"]
    assert main(["deploy", "init", str(tmp_path / "a"), "--insecure", *OF_DATA, *settings]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "model.factory mymodel:network is not on this machine" in told
    assert "--data-factory mydata:load is not on this machine" in told
    assert main(["deploy", "local", "--insecure", *settings]) == 2
    assert "model.factory 'mymodel:network': no such module is on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("server", ["localhost", "10.0.0.7", "node-1", "fl_1", "3com.ORG", "xn--exmple-cua.org"])
def test_a_server_is_reached_by_its_name_or_address(tmp_path: Path, server: str) -> None:
    site = Site(tmp_path, 1, server)
    assert f"{server}:9093" in node_command(site, 0)
    assert "--host" not in gate_command(site)


def test_a_server_with_an_ipv6_address_listens_there_and_is_certified_for_it(tmp_path: Path) -> None:
    assert main(["deploy", "init", str(tmp_path / "a"), "--clients", "2", "--server", "2001:db8::7"]) == 0
    assert "--superlink '[2001:db8::7]:9093'" in (tmp_path / "a" / "client-0" / "start.sh").read_text()
    assert "bcfl.deploy.gate --host :: --port 9093" in (tmp_path / "a" / "server" / "gate.sh").read_text()
    assert is_trusted(tmp_path / "a", "2001:db8::7")


def test_what_is_insecure_has_no_gate_and_no_keys(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    assert main(["deploy", "init", str(folder), "--set", "deploy.num_clients=3", "--insecure"]) == 0
    assert len(list(folder.glob("client-*"))) == 3
    assert "--insecure" in (folder / "client-0" / "start.sh").read_text()
    names = {path.name for path in folder.rglob("*")}
    assert not names & {"gate.sh", "bcfl-gate.service", "ca.crt", "node"}
