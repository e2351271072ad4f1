"""A ready folder for a federation: the app and its settings, certificates and keys, start scripts and units by role."""

import ipaddress
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcfl import __version__
from bcfl.deploy.pages import README, UNIT
from bcfl.runs.settings import Config

# Set before Flower's first call: without them even `--help` reports home, and nodes install what an app asks for.
LOCKED_DOWN = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds: each task is a new process, whose start takes longer
    "no_proxy": "127.0.0.1,localhost",
}
CONNECTION = "bcfl"  # what the SuperLink is called in Flower's own configuration
LINK_PORT, GATE_PORT, NODE_PORT = 9092, 9093, 9094
MAX_PORT = 65535
KEY_TOOLS = ("openssl", "ssh-keygen")
DAYS_A_YEAR = 365
OWN_HOSTS = ("127.0.0.1", "localhost")  # by which the SuperLink, which listens on 127.0.0.1, is reached without a gate
NAME_PART = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST_NAME = re.compile(rf"(?=.{{1,253}}$)({NAME_PART}\.)*(?![0-9]+$){NAME_PART}")  # 300.1.1.1 is no name, either


@dataclass(frozen=True)
class Site:
    """Where a federation's processes listen, and how they know each other."""

    folder: Path
    num_clients: int
    host: str = "127.0.0.1"  # the server as the clients reach it
    link_port: int = LINK_PORT  # the SuperLink's, on the server's loopback only
    gate_port: int | None = GATE_PORT  # what clients reach from outside; None: no gate, clients are on this machine
    node_ports: tuple[int, ...] | None = None  # of the clients' own loopback interfaces; None: from NODE_PORT on
    insecure: bool = False  # no TLS, no node keys: for a trial on loopback only
    data_factory: str | None = None  # package.module:function on each client's machine

    def __post_init__(self) -> None:
        if not HOST_NAME.fullmatch(self.host) and (self.address is None or "%" in self.host):
            raise ValueError(
                "--server must be a host name such as fl.example.org or an IP address, without scheme, port, brackets "
                f"or zone, got {self.host!r}"
            )
        if self.insecure and self.host not in OWN_HOSTS:
            raise ValueError(
                f"--insecure is for this machine alone: --server must be {' or '.join(OWN_HOSTS)}, got {self.host!r}"
            )
        if self.gate_port is not None and not 1 <= self.gate_port <= MAX_PORT:
            raise ValueError(f"--port must be from 1 to {MAX_PORT}, got {self.gate_port}")
        if self.gate_port == self.link_port:
            raise ValueError(f"--port {self.gate_port} is the SuperLink's own on the same machine; choose another")

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The server's IP address; None if the clients know it by name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def reached_by_ipv6(self) -> bool:
        return isinstance(self.address, ipaddress.IPv6Address)

    @property
    def server(self) -> Path:
        return self.folder / "server"

    def client(self, index: int) -> Path:
        return self.folder / f"client-{index}"


def init(site: Site, config: Config, terms: Mapping[str, Any]) -> None:
    """The folder holds all that a federation needs; each part goes to the machine of its name, keys nowhere else."""
    if site.folder.exists() and (not site.folder.is_dir() or any(site.folder.iterdir())):
        raise ValueError(f"{site.folder} already holds something; choose another folder")
    missing = [] if site.insecure else [tool for tool in KEY_TOOLS if shutil.which(tool) is None]
    if missing:
        needed = " and ".join(KEY_TOOLS)
        raise ValueError(
            f"{needed} make keys and certificates, but {' and '.join(missing)} cannot be found; install it"
        )
    was_there = site.folder.exists()
    before = os.umask(0o077)  # private keys are for their owner alone
    try:
        _write_app(site.folder / "app", config, {"num_clients": site.num_clients, "out": "run", **terms})
        (site.server / "nodes").mkdir(parents=True)
        for index in range(site.num_clients):
            site.client(index).mkdir()
        if not site.insecure:
            _make_certificates(site)
            _make_node_keys(site)
        _write_connection(site)
        _write_server(site)
        for index in range(site.num_clients):
            _write_client(site, index)
        (site.folder / "README.md").write_text(_readme(site))
    except BaseException:  # a second attempt finds the folder as the first did, and no key is left behind
        _remove(site.folder, only_contents=was_there)
        raise
    finally:
        os.umask(before)


def _remove(folder: Path, *, only_contents: bool) -> None:
    if not folder.is_dir():  # it could not even be made
        return
    for item in folder.iterdir():
        if item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()
    if not only_contents:
        folder.rmdir()


# ---- commands, as lists of arguments: none of them holds a secret, only the paths of files that do -------------------


def program(name: str) -> str:
    """A program of this Python's environment, or else whatever the search path has."""
    own = Path(sys.executable).parent / name
    return str(own) if own.exists() else name


def link_command(site: Site) -> list[str]:
    """The SuperLink, in the server's folder. It listens on loopback only: its control interface asks for no login."""
    security = (
        ["--insecure"]
        if site.insecure
        else [
            *("--ssl-certfile", "certificates/server.crt", "--ssl-keyfile", "certificates/server.key"),
            *("--ssl-ca-certfile", "certificates/ca.crt", "--enable-supernode-auth"),
        ]
    )
    where = ["--host", "127.0.0.1", "--port", str(site.link_port), "--database", "state.db"]
    return ["flower-superlink", *where, "--disable-runtime-dependency-installation", *security]


def gate_command(site: Site) -> list[str]:
    """The gate, in the server's folder: clients reach the SuperLink's interface for nodes through it, and no other."""
    where = ["--port", str(site.gate_port), "--link-port", str(site.link_port)]
    everywhere = ["--host", "::"] if site.reached_by_ipv6 else []
    return ["python3", "-m", "bcfl.deploy.gate", *everywhere, *where, "--certificates", "certificates"]


def node_command(site: Site, index: int) -> list[str]:
    """A client's SuperNode, in the client's folder."""
    port = site.link_port if site.gate_port is None else site.gate_port
    security = (
        ["--insecure"] if site.insecure else ["--root-certificates", "ca.crt", "--auth-supernode-private-key", "node"]
    )
    settings = f"partition-id={index} num-partitions={site.num_clients}"
    if site.data_factory is not None:
        settings += f' data-factory="{site.data_factory}"'
    own_port = NODE_PORT + index if site.node_ports is None else site.node_ports[index]
    host = f"[{site.host}]" if site.reached_by_ipv6 else site.host
    where = ["--superlink", f"{host}:{port}", "--host", "127.0.0.1", "--port", str(own_port)]
    return ["flower-supernode", *where, "--node-config", settings, *security]


# ---- files ----------------------------------------------------------------------------------------------------------


def _write_app(folder: Path, config: Config, terms: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    lines = [f"{key} = {_toml(value)}" for key, value in run_config(config, terms).items()]
    (folder / "pyproject.toml").write_text(APP.format(version=__version__, settings="\n".join(lines)))


def run_config(config: Config, terms: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as Flower's flat run configuration; what that cannot hold (nothing, lists) is written as text."""
    sections = {**config.all_settings(), "deploy": dict(terms)}  # Flower changes none that is not listed
    flat = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    texts = {key: "none" if value is None else value for key, value in flat.items()}
    return {key: str(value) if isinstance(value, list) else value for key, value in texts.items()}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML forbids, unlike JSON
    return repr(value)


APP = """\
# The Flower app: bcfl itself, which every machine has installed. `flwr run . {connection}` starts a run of it.
# Nothing is sent along but this file; its settings may be changed for one run with -c 'key=value'.
[project]
name = "bcfl-federation"
version = "{version}"
description = "Bayesian clustered federated learning"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "bcfl"
fab-include = ["pyproject.toml"]

[tool.flwr.app.components]
serverapp = "bcfl.deploy.app:server"
clientapp = "bcfl.deploy.app:client"

[tool.flwr.app.config]
{settings}
""".replace("{connection}", CONNECTION)


def _run_tool(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ValueError(f"{arguments[0]} failed: {said[-1]}")


def _make_certificates(site: Site) -> None:
    """A certificate authority of the federation's own, and a certificate for the server signed by it."""
    folder = site.server / "certificates"
    folder.mkdir()
    authority, authority_key = site.folder / "ca.crt", site.folder / "ca.key"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:secp384r1", "-nodes", "-sha384"]
    _run_tool(
        *("openssl", "req", "-x509", *curve, "-keyout", str(authority_key), "-out", str(authority)),
        *("-days", str(10 * DAYS_A_YEAR), "-subj", "/CN=bcfl federation"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    own_name = f"DNS:{site.host}" if site.address is None else f"IP:{site.address}"
    names = {"DNS:localhost", "IP:127.0.0.1", own_name}
    request, extensions = folder / "server.csr", folder / "server.ext"
    extensions.write_text(
        f"subjectAltName={','.join(sorted(names))}\nbasicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth\nauthorityKeyIdentifier=keyid\n"
    )
    _run_tool(
        *("openssl", "req", *curve, "-keyout", str(folder / "server.key"), "-out", str(request)),
        *("-subj", "/CN=bcfl server"),
    )
    _run_tool(
        *("openssl", "x509", "-req", "-in", str(request), "-CA", str(authority), "-CAkey", str(authority_key)),
        *("-CAcreateserial", "-sha384", "-days", str(2 * DAYS_A_YEAR), "-extfile", str(extensions)),
        *("-out", str(folder / "server.crt")),
    )
    request.unlink()
    extensions.unlink()
    for place in (folder, *(site.client(index) for index in range(site.num_clients))):
        shutil.copy(authority, place / "ca.crt")


def _make_node_keys(site: Site) -> None:
    for index in range(site.num_clients):
        key = site.client(index) / "node"
        _run_tool("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", f"client-{index}", "-f", str(key))
        shutil.copy(key.with_suffix(".pub"), site.server / "nodes" / f"client-{index}.pub")


def _write_connection(site: Site) -> None:
    """Flower's own configuration on the server, by which its commands find the SuperLink."""
    home = site.server / "flwr"
    home.mkdir()
    security = "insecure = true"
    if not site.insecure:
        security = f"root-certificates = {_toml(str((site.server / 'certificates' / 'ca.crt').resolve()))}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{site.link_port}"\n{security}\n'
    )


def _script(path: Path, purpose: str, commands: list[str]) -> None:
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in LOCKED_DOWN.items())
    path.write_text(SCRIPT.format(purpose=purpose, exports=exports, commands="\n".join(commands)))
    path.chmod(0o700)


SCRIPT = """\
#!/bin/sh
# {purpose}
set -eu
cd "$(dirname "$0")"
export FLWR_HOME="$PWD/flwr"
export PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
{exports}
{commands}
"""


def _write_server(site: Site) -> None:
    start = f"exec {shlex.join(link_command(site))}"
    _script(
        site.server / "start.sh", "Starts the SuperLink, which holds the server's side, in the foreground.", [start]
    )
    (site.server / "bcfl-server.service").write_text(
        UNIT.format(what="server", folder="server", script="start.sh", after="")
    )
    if site.gate_port is not None:
        gate = f"exec {shlex.join(gate_command(site))}"
        _script(
            site.server / "gate.sh", "Lets clients of other machines through to the SuperLink, and only them.", [gate]
        )
        (site.server / "bcfl-gate.service").write_text(
            UNIT.format(what="gate", folder="server", script="gate.sh", after=" bcfl-server.service")
        )
    # The certificate's place is known only here: the folder may have been moved since it was made.
    ready = f"python3 -m bcfl.deploy.ready --port {site.link_port}"
    fix = [ready] if site.insecure else [f"{ready} --certificates certificates", FIND_CERTIFICATE]
    register = f'exec flwr supernode register "$1" {CONNECTION}'
    _script(
        site.server / "register.sh",
        "Registers a client by its public key: ./register.sh nodes/client-0.pub",
        [*fix, register],
    )
    run = 'exec python3 -m bcfl.deploy.launch "${APP:-../app}" "$@"'
    _script(
        site.server / "run.sh",
        "Starts a run, or goes on with the one that was stopped, shows its log, and fails if the run does.",
        [*fix, run],
    )


FIND_CERTIFICATE = (
    'sed "s|^root-certificates = .*|root-certificates = \\"$PWD/certificates/ca.crt\\"|" '
    '"$FLWR_HOME/config.toml" > "$FLWR_HOME/config.new"\n'
    'mv "$FLWR_HOME/config.new" "$FLWR_HOME/config.toml"'
)


def _write_client(site: Site, index: int) -> None:
    start = f"exec {shlex.join(node_command(site, index))}"
    purpose = f"Starts client {index}'s SuperNode in the foreground. Its data stay on this machine."
    _script(site.client(index) / "start.sh", purpose, ["mkdir -p flwr", start])
    (site.client(index) / "bcfl-client.service").write_text(
        UNIT.format(what=f"client {index}", folder=f"client-{index}", script="start.sh", after="")
    )


def _readme(site: Site) -> str:
    port = site.link_port if site.gate_port is None else site.gate_port
    return README.format(num_clients=site.num_clients, last=site.num_clients - 1, host=site.host, port=port)
