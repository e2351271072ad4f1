"""The door in the wall: through it clients reach the SuperLink's interface for nodes, and nothing else of it.

All of Flower's interfaces are on one port, and the one by which runs are started asks for no login. So the SuperLink
listens on loopback, and this gate, on the network, lets through what nodes need: `/v1/fleet/…`, in pieces of bounded
size. It ends the clients' TLS with the server's certificate; the nodes' own signatures pass through it unchanged.
"""

import argparse
import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn

ALLOWED = re.compile(r"/v1/fleet/[a-z-]+")
TIMEOUT = 120  # seconds for a request to arrive, and for the SuperLink to answer it
MAX_BYTES = 32 * 2**20  # of one request: Flower sends arrays in pieces of 5 MB
NOT_FORWARDED = {b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"upgrade"}
NOT_ANSWERED = NOT_FORWARDED | {b"content-encoding"}  # httpx has decoded the body

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gate:
    """An ASGI application that forwards what is allowed to the SuperLink behind it."""

    def __init__(self, link: httpx.AsyncClient):
        self.link = link

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] != "POST" or ALLOWED.fullmatch(scope["path"]) is None:
            await _answer(send, 404)
            return
        try:
            async with asyncio.timeout(TIMEOUT):
                body = await _body(receive)
        except TimeoutError:
            await _answer(send, 408)
            return
        if body is None:
            return
        if len(body) > MAX_BYTES:
            await _answer(send, 413)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in NOT_FORWARDED]
        try:
            reply = await self.link.post(scope["path"], content=body, headers=headers)
        except httpx.HTTPError:
            await _answer(send, 502)
            return
        kept = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in NOT_ANSWERED]
        await _answer(send, reply.status_code, kept, reply.content)


async def _body(receive: Receive) -> bytes | None:
    """What was sent, as far as it is needed to see that it is too much; None if its sender has gone."""
    body = bytearray()
    while len(body) <= MAX_BYTES:
        part = await receive()
        if part["type"] == "http.disconnect":
            return None
        body += part.get("body", b"")
        if not part.get("more_body"):
            break
    return bytes(body)


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]] | None = None, body: bytes = b"") -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*(headers or []), length]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser(description="Let clients through to the SuperLink on this machine.")
    parser.add_argument("--host", default="0.0.0.0", help="where to listen (default: everywhere)")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--link-port", type=int, required=True, help="the SuperLink's port on loopback")
    parser.add_argument("--certificates", type=Path, required=True, help="folder of server.crt, server.key and ca.crt")
    options = parser.parse_args()
    trust = ssl.create_default_context(cafile=options.certificates / "ca.crt")
    link = httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{options.link_port}", verify=trust, timeout=TIMEOUT, trust_env=False
    )
    uvicorn.run(
        Gate(link),
        host=options.host,
        port=options.port,
        lifespan="off",
        log_level="warning",
        ssl_certfile=str(options.certificates / "server.crt"),
        ssl_keyfile=str(options.certificates / "server.key"),
    )


if __name__ == "__main__":
    main()
