"""The gate: registered nodes reach their interface of the SuperLink, and nobody else reaches anything."""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx

from bcfl.deploy import gate as gate_module
from bcfl.deploy.folder import Site, init
from bcfl.deploy.gate import MAX_BYTES, Gate, Room, neighbourhood
from bcfl.deploy.keys import Nodes
from bcfl.deploy.terms import read_settings

ROOT = Path(__file__).parent.parent.parent
PATH = "/v1/fleet/pull-messages"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("gate") / "federation", 2)
    init(site, *read_settings(None, [], 2))
    (site.server / "nodes" / "client-1.pub").unlink()  # whose key is as good, but not registered
    (site.server / "nodes" / "note.pub").write_text("no key")
    return site


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def echo(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=b"answer to " + request.content)


async def through_gate(
    site: Site, work: Callable[[httpx.AsyncClient, Gate], Any], link: Callable[[httpx.Request], httpx.Response] = echo
) -> Any:
    """What comes of the work of someone who reaches the gate, with this SuperLink behind it."""
    certificates = site.server / "certificates"
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    trust = ssl.create_default_context(cafile=site.folder / "ca.crt")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gate = Gate(httpx.MockTransport(link), "https://link", Nodes(site.server / "nodes"), tls)
        open_gate = asyncio.create_task(gate.listen(listener))
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, verify=trust, trust_env=False) as client:
            try:
                return await work(client, gate)
            finally:
                open_gate.cancel()


def ask(site: Site, path: str = PATH, method: str = "POST", link: Any = echo, **changes: Any) -> httpx.Response:
    """The gate's answer to a request that is client 0's, but for the changes."""
    from gate import signed

    headers = signed(site.client(changes.pop("client", 0)) / "node") | changes.pop("headers", {})

    async def work(client: httpx.AsyncClient, _: Gate) -> httpx.Response:
        target = client.base_url.copy_with(raw_path=path.encode())
        return await client.request(method, target, headers=headers, **{"content": b"hello", **changes})

    answer: httpx.Response = asyncio.run(through_gate(site, work, link))
    return answer


def never(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"{request.url} has reached the SuperLink")


def test_a_registered_node_is_let_through_with_its_signature(site: Site) -> None:
    seen: list[httpx.Request] = []

    def link(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, headers={"connection": "close", "grpc": "no"}, content=b"answer")

    answer = ask(site, link=link)
    assert (answer.status_code, answer.content, answer.headers["grpc"]) == (200, b"answer", "no")
    assert (seen[0].url.path, seen[0].content) == (PATH, b"hello")
    assert {"flwr-public-key", "flwr-signature", "flwr-timestamp"} <= seen[0].headers.keys()


def test_one_connection_serves_many_requests_of_many_bytes(site: Site) -> None:
    from gate import signed

    async def work(client: httpx.AsyncClient, gate: Gate) -> None:
        headers = signed(site.client(0) / "node")
        for size in (0, 5 * 2**20, 3):
            answer = await client.post(PATH, headers=headers, content=bytes(size))
            assert answer.content == b"answer to " + bytes(size)
        assert (len(gate.visits), len(gate.strangers.who_of), len(gate.members.who_of)) == (1, 0, 1)

    asyncio.run(through_gate(site, work))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/health",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet//v1/control/start-run",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/pull-messages?x",
    ],
)
def test_the_gate_lets_nothing_else_through(site: Site, path: str) -> None:
    assert ask(site, path, link=never).status_code == 404
    assert ask(site, PATH, "GET", link=never).status_code == 404


LATE = (datetime.now(UTC) - timedelta(hours=1)).isoformat()


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"headers": {"flwr-signature": "AAAA"}}, 401, "not signed"),
        ({"headers": {"flwr-signature": "ä".encode()}}, 401, "not signed"),
        ({"headers": {"flwr-public-key": "AAAA"}}, 401, "not signed"),
        ({"headers": {"flwr-timestamp": LATE}}, 401, "not signed"),  # what was signed is another time
        ({"headers": {"flwr-timestamp": "2030-01-01"}}, 401, "not signed"),
        ({"client": 1}, 412, "not among those in server/nodes/"),
        ({"content": bytes(MAX_BYTES + 1)}, 413, "at most"),
    ],
)
def test_who_is_no_node_of_ours_is_told_why_and_logged(
    site: Site, changes: Any, status: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = ask(site, link=never, **changes)
    assert answer.status_code == status
    assert says in answer.json()["detail"]
    assert "refused 127.0.0.1: " in caplog.text
    if status == 412:  # what a SuperNode shows of it
        from flwr.supercore.error import FlowerError

        told = FlowerError.from_json(answer.text)
        assert told is not None
        assert "its key SHA256:" in told.message


def test_a_node_whose_clock_is_wrong_is_told_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcfl.deploy.keys.CLOCKS_APART", -1.0)
    assert "its clock is 0 seconds off" in ask(site, link=never).json()["detail"]


def test_a_key_that_comes_or_goes_is_noticed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from gate import signed

    now = [0.0]
    monkeypatch.setattr("bcfl.deploy.keys.time.monotonic", lambda: now[0])
    nodes, key = Nodes(site.server / "nodes"), site.server / "nodes" / "client-1.pub"
    headers = {name.encode(): value.encode() for name, value in signed(site.client(1) / "node").items()}
    assert nodes.refusal(headers) is not None
    key.write_bytes((site.client(1) / "node.pub").read_bytes())
    now[0] = 1.0
    assert nodes.refusal(headers) is None
    key.unlink()
    now[0] = 7.0
    assert nodes.refusal(headers) is not None


def test_a_key_that_the_superlink_refuses_is_named_to_its_owner_and_in_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def link(request: httpx.Request) -> httpx.Response:
        return httpx.Response(412, json={"code": 2004, "detail": "Failed to activate SuperNode."})

    answer = ask(site, "/v1/fleet/activate-node", link=link)
    assert answer.status_code == 412
    for told in (answer.json()["detail"], caplog.text):
        assert re.search(r"key SHA256:\S{43} .*register\.sh.* connected", told)


def test_a_superlink_that_is_down_is_named(site: Site) -> None:
    def down(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("down")

    assert ask(site, link=down).status_code == 502


@pytest.mark.parametrize("part", [b"", b"POST / HTTP/1.1\r\nHost: gate\r\n"])
def test_headers_that_do_not_end_are_not_waited_for(site: Site, part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "HEADER_SECONDS", 0.3)

    async def work(client: httpx.AsyncClient, gate: Gate) -> None:
        trust = ssl.create_default_context(cafile=site.folder / "ca.crt")
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port, ssl=trust if part else None)
        writer.write(part)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
        assert not gate.strangers.who_of

    asyncio.run(through_gate(site, work))


def test_who_has_most_connections_loses_the_oldest() -> None:
    async def work() -> None:
        room = Room(of_one=3, in_all=4)
        tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(7)]
        for task, who in zip(tasks, "aaaabca", strict=True):
            room.enter(task, who)
        await asyncio.sleep(0)
        assert [task.cancelled() for task in tasks] == [True, True, True, False, False, False, False]
        assert list(room.who_of.values()) == list("abca")
        for task in tasks:
            task.cancel()

    asyncio.run(work())


def test_an_address_is_told_by_what_its_owner_cannot_change_at_will() -> None:
    assert neighbourhood("::ffff:10.0.0.7") == neighbourhood("10.0.0.7") != neighbourhood("10.0.0.8")
    assert neighbourhood("2001:db8::7") == neighbourhood("2001:db8::8%eth0") != neighbourhood("2001:db8:0:1::7")


@pytest.mark.slow
def test_a_siege_without_a_key_neither_fills_the_memory_nor_keeps_a_node_out(tmp_path: Path) -> None:
    """A tenth of benchmarks/gate.py: of what the gate once was it took 300 MB."""
    from gate import Attack, guarded, under

    with guarded(tmp_path / "federation") as gate:
        seconds, growth, _ = under(Attack(num_headers=300, num_bodies=10, seconds=6.0, insists=True), gate)
    assert max(seconds.values()) < 5
    assert growth < 100e6
