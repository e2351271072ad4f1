"""The gate of a federation under attack, on loopback only: is a registered node served, and what does it cost?

Someone without a key opens thousands of TLS connections and never ends the headers, and sends bodies that are never
signed. `python benchmarks/gate.py` takes a minute or two, and writes benchmarks/gate.json.
"""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import resource
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from measure import Row, row, show, status_bytes

from bcfl.deploy.folder import Site, gate_command, init
from bcfl.deploy.processes import free_ports
from bcfl.deploy.terms import read_settings

RESULTS = Path(__file__).with_name("gate.json")
PATH = "/v1/fleet/pull-messages"
START = f"POST {PATH} HTTP/1.1\r\nHost: gate\r\n".encode()
ADDRESSES = {"the attacker's address": "127.0.0.1", "another": "127.0.0.2"}


@dataclass(frozen=True)
class Attack:
    """What one address does to the gate; whoever is thrown out comes again if it insists."""

    num_headers: int = 2000
    num_bodies: int = 200
    body_bytes: int = 31 * 2**20
    insists: bool = False
    seconds: float = 20.0  # at least; and until every connection has been tried
    most_seconds: float = 300.0

    @property
    def connections(self) -> int:
        return self.num_headers + self.num_bodies


class Link(BaseHTTPRequestHandler):
    """In place of the SuperLink: it takes what comes and answers."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@dataclass(frozen=True)
class Guarded:
    """A gate that runs, with a link behind it and registered nodes."""

    site: Site
    process: int

    def ask(self, host: str, body: bytes = b"hello") -> httpx.Response:
        """What the gate answers the registered node that comes from this address, anew each time."""
        trust = ssl.create_default_context(cafile=self.site.folder / "ca.crt")
        with httpx.Client(transport=httpx.HTTPTransport(verify=trust, local_address=host), timeout=5) as client:
            url, key = f"https://127.0.0.1:{self.site.gate_port}{PATH}", self.site.client(0) / "node"
            return client.post(url, content=body, headers=signed(key))

    def memory(self, peak: bool = False) -> int:
        return status_bytes("VmHWM" if peak else "VmRSS", self.process)


def signed(key_file: Path) -> dict[str, str]:
    """The headers by which a SuperNode with this key shows who it is."""
    key = serialization.load_ssh_private_key(key_file.read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    now, public = datetime.now(UTC).isoformat(), key.public_key().public_bytes(encoding, form)
    signature = key.sign(now.encode(), ECDSA(hashes.SHA256()))
    texts = {"flwr-public-key": b64encode(public), "flwr-signature": b64encode(signature)}
    return {"flwr-timestamp": now, **{name: text.decode() for name, text in texts.items()}}


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Guarded]:
    link_port, gate_port = free_ports(2)
    site = Site(folder, 2, link_port=link_port, gate_port=gate_port)
    init(site, *read_settings(None, [], 2))
    certificates = site.server / "certificates"
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    link = ThreadingHTTPServer(("127.0.0.1", link_port), Link)
    link.socket = tls.wrap_socket(link.socket, server_side=True)
    threading.Thread(target=link.serve_forever, daemon=True).start()
    with (site.server / "gate.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *gate_command(site)[1:]], cwd=site.server, stderr=log)
    try:
        found = Guarded(site, process.pid)
        wait_until_served(found, "127.0.0.1", 30)
        yield found
    finally:
        process.terminate()
        process.wait(10)
        link.shutdown()
        link.server_close()


def wait_until_served(gate: Guarded, host: str, seconds: float = 60) -> float:
    """How long the node takes, which tries again as SuperNodes do; `seconds` if it is not served before."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        with contextlib.suppress(httpx.TransportError):
            if gate.ask(host).content == b"hello":
                return time.monotonic() - start
        time.sleep(0.1)
    return seconds


async def _besiege(port: int, attack: Attack, held: Any) -> None:
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    tried = set[int]()

    async def intrude(number: int, body_bytes: int) -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, ssl_handshake_timeout=30)
                with contextlib.closing(writer):
                    writer.write(START)
                    if body_bytes:
                        writer.write(f"Content-Length: {body_bytes}\r\n\r\n".encode())
                    for _ in range(body_bytes // 2**20 - 1):  # the last megabyte never comes
                        writer.write(bytes(2**20))
                        await writer.drain()
                    held.value += number not in tried
                    tried.add(number)
                    await reader.read()
            tried.add(number)
            if not attack.insists:
                return
            await asyncio.sleep(0.5)

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # that who is thrown out cannot write any more
    sizes = [0] * attack.num_headers + [attack.body_bytes] * attack.num_bodies
    tasks = [asyncio.create_task(intrude(*one)) for one in enumerate(sizes)]
    await asyncio.sleep(attack.seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(attack.most_seconds - attack.seconds):
            while len(tried) < attack.connections:
                await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()


def besiege(port: int, attack: Attack, held: Any) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_besiege(port, attack, held))


def under(attack: Attack, gate: Guarded) -> tuple[dict[str, float], int, str]:
    """The longest time that a node waited from each address meanwhile, how memory grew at most, and what was done."""
    spawn = multiprocessing.get_context("spawn")
    before, held = gate.memory(), spawn.Value("i", 0)
    attacker = spawn.Process(target=besiege, args=(gate.site.gate_port, attack, held), daemon=True)
    attacker.start()
    longest = dict.fromkeys(ADDRESSES, 0.0)
    while attacker.is_alive():
        for name, host in ADDRESSES.items():
            longest[name] = max(longest[name], wait_until_served(gate, host))
        time.sleep(0.2)
    done = f"{held.value} of {attack.connections} connections sent all that they wanted to"
    return longest, gate.memory(peak=True) - before, done


def rows() -> list[Row]:
    found = []
    for insists, what in ((False, "held open"), (True, "opened again when thrown out")):
        with tempfile.TemporaryDirectory() as folder, guarded(Path(folder, "federation")) as gate:
            seconds, growth, done = under(Attack(insists=insists), gate)
        for name, longest in seconds.items():
            found.append(row(f"{what}: a node from {name} waits", longest, 5, "seconds", done))
        found.append(row(f"{what}: memory grows by", growth / 1e6, 100, "MB", done))
    return found


if __name__ == "__main__":
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    now = rows()
    show(now, before)
    RESULTS.write_text(json.dumps(now, indent=1) + "\n")
