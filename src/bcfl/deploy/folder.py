"""A ready folder for a federation: the app and its settings, certificates and keys, start scripts and units by role."""

import ipaddress
import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcfl import __version__
from bcfl.deploy.keys import make_authority, make_node_key, make_server_certificate
from bcfl.deploy.ready import CONNECTION
from bcfl.runs.settings import Config

# Set before Flower's first call: without them even `--help` reports home, and nodes install what an app asks for.
LOCKED_DOWN = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds: each task is a new process, whose start takes longer
    "no_proxy": "127.0.0.1,localhost",
}
LINK_PORT, GATE_PORT, NODE_PORT = 9092, 9093, 9094
MAX_PORT = 65535
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
    def port(self) -> int:
        """Where clients reach the server."""
        return self.link_port if self.gate_port is None else self.gate_port

    @property
    def server(self) -> Path:
        return self.folder / "server"

    def client(self, index: int) -> Path:
        return self.folder / f"client-{index}"


def init(site: Site, config: Config, terms: Mapping[str, Any]) -> None:
    """The folder holds all that a federation needs; each part goes to the machine of its name, keys nowhere else."""
    if site.folder.exists() and (not site.folder.is_dir() or any(site.folder.iterdir())):
        raise ValueError(f"{site.folder} already holds something; choose another folder")
    was_there = site.folder.exists()
    before = os.umask(0o077)  # private keys are for their owner alone
    try:
        settings = run_config(config, {"num_clients": site.num_clients, "out": "run", **terms})
        lines = "\n".join(f"{key} = {_toml(value)}" for key, value in settings.items())
        _fill("app", site.folder / "app", version=__version__, settings=lines)
        _fill("server", site.server, link=link_command(site), gate=gate_command(site), ready=ready_command(site))
        for index in range(site.num_clients):
            _fill("client", site.client(index), index=index, node=node_command(site, index))
        _fill("README.md", site.folder, site=site)
        if site.gate_port is None:
            for path in (site.server / "gate.sh", site.server / "bcfl-gate.service"):
                path.unlink()
        if not site.insecure:
            _make_keys(site)
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


def ready_command(site: Site) -> list[str]:
    """In the server's folder: from here on Flower's own commands find the SuperLink, and it answers."""
    security = [] if site.insecure else ["--certificates", "certificates"]
    return ["python3", "-m", "bcfl.deploy.ready", "--port", str(site.link_port), *security]


def node_command(site: Site, index: int) -> list[str]:
    """A client's SuperNode, in the client's folder."""
    security = (
        ["--insecure"] if site.insecure else ["--root-certificates", "ca.crt", "--auth-supernode-private-key", "node"]
    )
    settings = f"partition-id={index} num-partitions={site.num_clients}"
    if site.data_factory is not None:
        settings += f' data-factory="{site.data_factory}"'
    own_port = NODE_PORT + index if site.node_ports is None else site.node_ports[index]
    host = f"[{site.host}]" if site.reached_by_ipv6 else site.host
    where = ["--superlink", f"{host}:{site.port}", "--host", "127.0.0.1", "--port", str(own_port)]
    return ["flower-supernode", *where, "--node-config", settings, *security]


# ---- files ----------------------------------------------------------------------------------------------------------


def _fill(part: str, folder: Path, **known: Any) -> None:
    """The folder holds each template of that part, filled with what is known; commands are quoted for the shell."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(loader=PackageLoader("bcfl.deploy"), undefined=StrictUndefined, keep_trailing_newline=True)
    known = {name: shlex.join(value) if isinstance(value, list) else value for name, value in known.items()}
    locked_down = {name: shlex.quote(value) for name, value in LOCKED_DOWN.items()}
    for name in templates.list_templates(filter_func=lambda name: name.startswith(part)):
        path = folder / name.removeprefix(f"{part}/").removesuffix(".jinja")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = templates.get_template(name).render(connection=CONNECTION, locked_down=locked_down, **known)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o700)


def _make_keys(site: Site) -> None:
    """An authority of the federation's own, a certificate for the server signed by it, and a key for every node."""
    places = [site.server / "certificates", *(site.client(index) for index in range(site.num_clients))]
    places[0].mkdir()
    authority = make_authority(site.folder / "ca.crt", site.folder / "ca.key")
    hosts = sorted({*OWN_HOSTS, site.host})
    make_server_certificate(authority, hosts, places[0] / "server.crt", places[0] / "server.key")
    for place in places:
        shutil.copy(site.folder / "ca.crt", place)
    (site.server / "nodes").mkdir()
    for index, place in enumerate(places[1:]):
        make_node_key(place / "node", f"client-{index}")
        shutil.copy(place / "node.pub", site.server / "nodes" / f"client-{index}.pub")


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
