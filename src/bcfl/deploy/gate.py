"""The door in the wall: through it registered nodes reach the SuperLink's interface for nodes, and nothing else of it.

All of Flower's interfaces are on one port, and the one by which runs are started asks for no login. So the SuperLink
listens on loopback, and this gate, on the network, lets through what nodes need: `/v1/fleet/…`, in pieces of bounded
size. It ends the clients' TLS with the server's certificate and reads the headers, which nodes sign: only from those
whose keys it knows it takes a body, and passes it on as it comes. Who has not signed yet gets some seconds, no memory,
and a share of the room; where that is full, the address with most such connections loses its oldest.
"""

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import re
import resource
import socket
import ssl
import time
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import h11
import httpx

from bcfl.deploy.keys import REFUSED, Nodes, fingerprint

ALLOWED = re.compile(rb"/v1/fleet/[a-z-]+")
HEADER_SECONDS = 10.0  # from a connection to its first signature
TIMEOUT = 120.0  # seconds for a request and its answer, and of rest between two of them
LINGER_SECONDS = 1.0
MAX_HEADER_BYTES = 16 * 2**10
MAX_BYTES = 32 * 2**20  # of one request: Flower sends arrays in pieces of 5 MB
CHUNK = 16 * 2**10
OF_ONE_ADDRESS, IN_ALL = 128, 512  # connections that have not signed yet
OF_ONE_NODE, OF_ALL_NODES = 32, 4096
HOP_BY_HOP = {b"host", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"expect", b"te", b"trailer"}
NOT_ACTIVATED = 2004  # Flower's number for a node that is not let in

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Room:
    """Connections by whose they are; where there are too many, whoever has most loses its oldest."""

    of_one: int
    in_all: int
    who_of: dict[asyncio.Task[None], str] = field(default_factory=dict)  # oldest first

    def enter(self, task: asyncio.Task[None], who: str) -> None:
        self.who_of[task] = who
        counts = Counter(self.who_of.values())
        if counts[who] <= self.of_one:
            if len(self.who_of) <= self.in_all:
                return
            who = counts.most_common(1)[0][0]
        oldest = next(task for task, its in self.who_of.items() if its == who)
        self.leave(oldest)
        oldest.cancel()

    def leave(self, task: asyncio.Task[None]) -> None:
        self.who_of.pop(task, None)


@dataclass
class Visit:
    """One connection: requests come in by parts, and answers go out, through TLS.

    asyncio's own TLS takes 256 kB for each connection, and gives them back late.
    """

    host: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    context: InitVar[ssl.SSLContext]
    http: h11.Connection = field(default_factory=lambda: h11.Connection(h11.SERVER, MAX_HEADER_BYTES))

    def __post_init__(self, context: ssl.SSLContext) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)

    async def next_request(self) -> h11.Request | None:
        """The next request without its body; None if there is no other."""
        if h11.DONE is self.http.our_state is self.http.their_state:
            self.http.start_next_cycle()
        request = await self._next() if self.http.our_state is h11.IDLE else None
        return request if isinstance(request, h11.Request) else None

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(part := await self._next(), h11.Data):
            yield bytes(part.data)

    async def say(self, part: h11.Event) -> None:
        data = self.http.send(part)
        if data:
            await self._through_tls(self.tls.write, data)

    async def refuse(self, status: int, reason: str) -> None:
        body = json.dumps({"code": NOT_ACTIVATED, "detail": f"the gate refuses this node: {reason}"}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for part in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            await self.say(part)

    async def leave(self) -> None:
        """The last word has reached whoever still talks: what comes meanwhile is read and thrown away."""
        self.writer.write_eof()
        async with asyncio.timeout(LINGER_SECONDS):
            while await self.reader.read(CHUNK):
                pass

    async def _next(self) -> Any:
        while (part := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self._through_tls(self.tls.read, CHUNK))
        return part

    async def _through_tls(self, action: Callable[[T], R], argument: T) -> R:
        """What the action returns, once all that it waits for has come and all that it says has gone out."""
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                done = action(argument)
                await self._flush()
                return done
            await self._flush()
            data = await self.reader.read(CHUNK)
            if not data:
                raise ConnectionResetError("the connection has ended")
            self.incoming.write(data)

    async def _flush(self) -> None:
        self.writer.write(self.outgoing.read())
        await self.writer.drain()


@dataclass
class Gate:
    """Lets the requests of nodes through to the SuperLink behind `link`, and holds off all others."""

    link: httpx.AsyncBaseTransport
    url: str
    nodes: Nodes
    tls: ssl.SSLContext
    strangers: Room = field(default_factory=lambda: Room(OF_ONE_ADDRESS, IN_ALL))
    members: Room = field(default_factory=lambda: Room(OF_ONE_NODE, OF_ALL_NODES))
    visits: set[asyncio.Task[None]] = field(default_factory=set)
    next_line: float = 0.0

    async def listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        while True:
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # it has gone already, or there are no more file descriptors
                await asyncio.sleep(0.1)
                continue
            visit = asyncio.create_task(self._receive(connection, address[0]))
            self.visits.add(visit)
            visit.add_done_callback(self.visits.discard)
            await asyncio.sleep(0)  # the visit begins before anything can end it

    async def _receive(self, connection: socket.socket, host: str) -> None:
        """All of a visit, from before TLS is agreed on; whatever goes wrong with it, or takes too long, ends it."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        with contextlib.ExitStack() as at_the_end, contextlib.suppress(OSError, h11.ProtocolError, httpx.HTTPError):
            for room in (self.strangers, self.members):
                at_the_end.callback(room.leave, task)
            self.strangers.enter(task, neighbourhood(host))
            reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK)
            at_the_end.callback(writer.transport.abort)
            visit = Visit(host, reader, writer, self.tls)
            async with asyncio.timeout(HEADER_SECONDS) as limit:
                while (request := await visit.next_request()) and await self._admit(visit, request):
                    if task in self.strangers.who_of:
                        self.strangers.leave(task)
                        self.members.enter(task, dict(request.headers)[b"flwr-public-key"].decode())
                    limit.reschedule(loop.time() + TIMEOUT)
                    await self._forward(visit, request)
                    limit.reschedule(loop.time() + TIMEOUT)
                await visit.leave()

    async def _admit(self, visit: Visit, request: h11.Request) -> bool:
        """Whether the request is a node's; anybody else is told why it is not let through."""
        headers, refusal = dict(request.headers), None
        if request.method != b"POST" or ALLOWED.fullmatch(request.target) is None:
            refusal = 404, "there is nothing here"
        elif not 0 <= int(headers.get(b"content-length", -1)) <= MAX_BYTES:
            refusal = 413, f"a request must say its length, of at most {MAX_BYTES} bytes"
        else:
            refusal = self.nodes.refusal(headers)
        if refusal is None:
            return True
        await self._refuse(visit, *refusal)
        return False

    async def _refuse(self, visit: Visit, status: int, reason: str) -> None:
        if time.monotonic() > self.next_line:  # strangers must not fill the disk
            self.next_line = time.monotonic() + 1
            log.warning("refused %s: %s", visit.host, reason)
        await visit.refuse(status, reason)

    async def _forward(self, visit: Visit, request: h11.Request) -> None:
        """The request to the SuperLink and its answer back, both as they come; none of them is ever here as a whole."""
        headers = [(name, value) for name, value in request.headers if name not in HOP_BY_HOP]
        url = self.url + request.target.decode()
        try:
            reply = await self.link.handle_async_request(
                httpx.Request("POST", url, headers=headers, content=visit.body())
            )
        except httpx.TransportError:
            await visit.refuse(502, "the SuperLink behind the gate does not answer")
            return
        async with contextlib.aclosing(reply):
            if reply.status_code == REFUSED and request.target.endswith(b"/activate-node"):
                key = fingerprint(b64decode(dict(request.headers)[b"flwr-public-key"]))
                reason = f"the SuperLink does not know its key {key} (register.sh), or holds it for connected already"
                await self._refuse(visit, REFUSED, f"{reason}: then try again in a minute")
                return
            kept = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in HOP_BY_HOP]
            await visit.say(h11.Response(status_code=reply.status_code, headers=kept))
            assert isinstance(reply.stream, httpx.AsyncByteStream)
            async for part in reply.stream:  # as it is, compressed or not
                await visit.say(h11.Data(data=part))
            await visit.say(h11.EndOfMessage())


def neighbourhood(host: str) -> str:
    """Whose an address is, as far as it tells: of IPv6 everybody has 2⁶⁴, so that only the first half counts."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or int(address) >> 64)


async def serve(listener: socket.socket, link_port: int, certificates: Path, nodes: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    trust = ssl.create_default_context(cafile=certificates / "ca.crt")
    limits = httpx.Limits(max_connections=100, keepalive_expiry=2)  # before the SuperLink ends them, after 5 seconds
    async with httpx.AsyncHTTPTransport(verify=trust, trust_env=False, limits=limits) as link:
        await Gate(link, f"https://127.0.0.1:{link_port}", Nodes(nodes), tls).listen(listener)


def main() -> None:
    parser = argparse.ArgumentParser(description="Let registered clients through to the SuperLink on this machine.")
    parser.add_argument("--host", default="0.0.0.0", help="where to listen (default: everywhere)")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--link-port", type=int, required=True, help="the SuperLink's port on loopback")
    parser.add_argument("--certificates", type=Path, required=True, help="folder of server.crt, server.key and ca.crt")
    parser.add_argument("--nodes", type=Path, help="folder of the clients' public keys (default: nodes/ beside it)")
    options = parser.parse_args()
    nodes = options.nodes or options.certificates.resolve().parent / "nodes"
    if not nodes.is_dir():
        parser.error(f"--nodes must be the folder of the clients' public keys, but there is no {nodes}")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(format="%(asctime)s %(message)s")
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.create_server(
        (options.host, options.port), family=family, backlog=4096, dualstack_ipv6=options.host == "::"
    )
    # A visit that was ended is a circle of frames and errors: under attack its memory must come back at once. What has
    # been loaded so far is left aside, so that looking for circles costs next to nothing.
    gc.freeze()
    gc.set_threshold(700, 1, 1)
    with listener, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(listener, options.link_port, options.certificates, nodes))


if __name__ == "__main__":
    main()
