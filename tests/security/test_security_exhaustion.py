"""Exhaustion before a login: each attack on a real gateway while a session plays through it.

The attacks come from `turboserve bench edge`. Timeouts are short here, so that the tests are.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import httpx
import pytest
import websockets

from tests.helpers.pool_harness import Pool
from tests.helpers.ports import free_ports
from tests.helpers.waiting import eventually_blocking
from turboserve.bench.edge import attacks
from turboserve.gateway.serving.guard import READ_BYTES
from turboserve.gateway.serving.protocols import BURST_S
from turboserve.gateway.serving.settings import ServerSettings

MEGABYTE = 1_000_000
PATIENCE_S = 60.0
DESCRIPTORS = 256
FRAME_RATE = ServerSettings.model_fields["frame_rate_limit"].default
SHORT = {
    "TURBOSERVE_HEADER_TIMEOUT_S": "5",
    "TURBOSERVE_BODY_TIMEOUT_S": "5",
    "TURBOSERVE_KEEP_ALIVE_S": "1",
    "TURBOSERVE_WRITE_TIMEOUT_S": "3",
    "TURBOSERVE_ALLOWED_HOSTS": "here",
}
HEALTH_VARIABLE = "TURBOSERVE_HEALTH_PORT"


class Attacked:
    """A gateway, and a session that plays through it."""

    def __init__(self, pool: Pool, name: str, descriptors: int, **environment: str) -> None:
        self.pool, self.name = pool, name
        self.url: str = pool.gateway(name, 0, descriptors, **SHORT, **environment)
        self.pid: int = pool.pid(name)
        self.address: attacks.Address = ("127.0.0.1", httpx.URL(self.url).port or 0)
        self.health: attacks.Address = ("127.0.0.1", int(environment.get(HEALTH_VARIABLE, 0)))

    def session(self) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/sessions", json={"prompt": "a red circle"}, timeout=PATIENCE_S)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def rss(self) -> int:
        return attacks.rss_bytes(self.pid)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with Pool(tmp_path_factory.mktemp("pool")).running() as pool:
        yield pool


@pytest.fixture(scope="module")
def attacked(pool: Pool) -> Attacked:
    """The gateway has few descriptors, which the attacks try to use up."""
    [health] = free_ports(1)
    return Attacked(pool, "attacked", DESCRIPTORS, **{HEALTH_VARIABLE: str(health)})


class Player:
    """Plays one session in a thread, and records when each chunk came."""

    def __init__(self, attacked: Attacked) -> None:
        self.session = attacked.session()
        self.indices: list[int] = []
        self.problem: BaseException | None = None
        self._url = attacked.url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Player:
        self._thread.start()
        self.plays_on(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        httpx.delete(f"{self._url}/v1/sessions/{self.session['id']}", timeout=PATIENCE_S)

    def plays_on(self, chunks: int) -> None:
        """Wait for `chunks` more chunks, over the same connection."""
        wanted = len(self.indices) + chunks
        deadline = time.monotonic() + PATIENCE_S
        while len(self.indices) < wanted:
            assert self.problem is None, repr(self.problem)
            assert self._thread.is_alive(), "the stream ended"
            assert time.monotonic() < deadline, f"no chunk for {PATIENCE_S} s"
            time.sleep(0.05)
        assert self.indices == list(range(len(self.indices)))

    def _run(self) -> None:
        try:
            asyncio.run(self._play())
        except BaseException as error:
            self.problem = error

    async def _play(self) -> None:
        url = self._url.replace("http", "ws", 1) + self.session["links"]["stream"]
        patient: dict[str, Any] = {"open_timeout": PATIENCE_S, "ping_interval": None}
        async with websockets.connect(url, max_size=None, **patient) as stream:
            while not self._stop.is_set():
                with suppress(TimeoutError):
                    raw = await asyncio.wait_for(stream.recv(), 0.5)
                    if isinstance(raw, str) and (message := json.loads(raw))["type"] == "chunk":
                        self.indices.append(message["index"])
                        await stream.send(json.dumps({"type": "playhead", "playhead_s": message["start_s"]}))


def test_headers_without_an_end_are_refused_and_take_no_memory(attacked: Attacked) -> None:
    """Incident: 150 MB of headers took 173 MB of memory, which stayed."""
    before = attacked.rss()
    with ExitStack() as held:
        for _ in range(4):
            taken = held.enter_context(attacks.endless_headers(attacked.address, 32 * MEGABYTE))
            # Bytes in the kernel's buffers count as sent.
            assert taken < 16 * MEGABYTE
        assert attacked.rss() - before < 20 * MEGABYTE
    with closing(attacks.connect(attacked.address, PATIENCE_S)) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nX-A: " + b"x" * 20_000)
        answer = one.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in answer


def test_too_many_headers_are_refused(attacked: Attacked) -> None:
    # Each on a connection of its own: the gateway closes an idle one after a second.
    def ask(headers: int) -> httpx.Response:
        lines = [(f"X-{n}", "v") for n in range(headers)]
        return httpx.get(f"{attacked.url}/healthz", headers=lines, timeout=PATIENCE_S)

    assert ask(90).status_code == 200
    refused = ask(101)
    assert (refused.status_code, refused.json()["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("what", ["headers", "line"])
def test_a_websocket_handshake_that_is_too_large_leaves_no_traceback(attacked: Attacked, what: str) -> None:
    """Incident: the library's own limits ended in a failed assertion of the server."""
    with closing(attacks.connect(attacked.address, PATIENCE_S)) as one:
        more = b"X-A: b\r\n" * 120 if what == "headers" else b"X-A: " + b"b" * 10_000 + b"\r\n"
        one.sendall(
            b"GET /v1/sessions/ses_x/stream HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" + more + b"\r\n"
        )
        assert one.recv(65_536).startswith(b"HTTP/1.1 431 ")
    assert "Traceback" not in attacked.pool.log(attacked.name)


def test_connections_that_never_ask_for_anything_are_closed(attacked: Attacked) -> None:
    """Incident: all of 270 half-open connections still existed after 87 s."""
    beginnings = [
        b"",
        b"GET / HTTP/1.1\r\nHost: here\r\nX-A: ",
        b"POST /v1/sessions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{",
        # Answered, and then idle.
        b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n",
        # Answered, and then half of the next request.
        b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\nGET / HTTP/1.1\r\nHost: he",
        # A body that is never read.
        b"GET /healthz HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\nx",
    ]
    with Player(attacked) as player, ExitStack() as held:
        opened = [
            one
            for beginning in beginnings
            for one in held.enter_context(attacks.half_open(attacked.address, 20, beginning, PATIENCE_S))
        ]
        assert len(opened) == 20 * len(beginnings)
        eventually_blocking(
            lambda: not attacks.still_open(opened), PATIENCE_S, "half-open connections stay open"
        )
        player.plays_on(1)


def test_a_request_that_comes_a_byte_at_a_time_is_cut_off(attacked: Attacked) -> None:
    for beginning in (
        b"GET / HTTP/1.1\r\nHost: here\r\nX-A: ",
        b"POST /v1/sessions HTTP/1.1\r\nHost: here\r\nContent-Length: 9999\r\n\r\n",
    ):
        with closing(attacks.connect(attacked.address, PATIENCE_S)) as one:
            one.sendall(beginning)
            answer = b""
            deadline = time.monotonic() + PATIENCE_S
            while not answer and time.monotonic() < deadline:
                one.settimeout(0.2)
                with suppress(TimeoutError):
                    answer = one.recv(65_536)
                    break
                with suppress(OSError):
                    one.sendall(b"x")
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b'"code":"request_timeout"' in answer


def test_idle_sockets_starve_no_client(attacked: Attacked) -> None:
    """Incident: at 246 idle of 256 descriptors the supervisor killed the gateway with all viewers."""
    with Player(attacked) as player, ExitStack() as held:
        for _ in range(3):
            held.enter_context(attacks.half_open(attacked.address, DESCRIPTORS + 44, b"", PATIENCE_S))
            assert attacks.descriptors(attacked.pid) < DESCRIPTORS - 16
            assert attacks.answers(attacked.address, timeout_s=PATIENCE_S), "a stranger is not answered"
            assert attacks.answers(attacked.health, timeout_s=PATIENCE_S), "the supervisor is not answered"
            player.plays_on(1)
        second = attacked.session()  # The broker is reached.
        httpx.delete(f"{attacked.url}{second['links']['self']}", timeout=PATIENCE_S)
    eventually_blocking(
        lambda: "connections refused" in attacked.pool.log(attacked.name), PATIENCE_S, "nothing was logged"
    )
    assert attacks.rss_bytes(attacked.pid) < 400 * MEGABYTE


def test_served_connections_up_to_the_limit_leave_the_reserve_and_the_viewers(attacked: Attacked) -> None:
    """Served streams do not make room: new clients are refused with an error."""
    with Player(attacked) as player, ExitStack() as held:
        events = f"GET {player.session['links']['events']} HTTP/1.1\r\nHost: here\r\n\r\n".encode()
        answer = b""
        for _ in range(DESCRIPTORS):
            one = held.enter_context(closing(attacks.connect(attacked.address, PATIENCE_S)))
            with suppress(ConnectionError):
                one.sendall(events)
            # Each is served before the next one comes, so none makes room.
            answer = one.recv(65_536)
            if not answer.startswith(b"HTTP/1.1 200 "):
                break
        assert answer.startswith(b"HTTP/1.1 503 "), answer
        assert b"retry-after: 5" in answer.lower()
        assert b'"code":"too_many_connections"' in answer
        assert attacks.descriptors(attacked.pid) < DESCRIPTORS - 16
        player.plays_on(2)
    eventually_blocking(
        lambda: attacks.answers(attacked.address), PATIENCE_S, "the gateway does not come back"
    )


def test_a_flood_of_pings_takes_no_memory_and_delays_no_other_client(attacked: Attacked) -> None:
    """Incident: without a reader for the pongs, the gateway grew from 93 to 258 MB in 12 s."""
    with Player(attacked) as player, ExitStack() as held:
        before = attacked.rss()
        path = player.session["links"]["stream"]
        flooding = [
            held.enter_context(attacks.handshake(attacked.address, path, PATIENCE_S)) for _ in range(4)
        ]
        begun = time.monotonic()
        threads = [threading.Thread(target=attacks.ping_flood, args=(one, 4.0)) for one in flooding]
        for thread in threads:
            thread.start()
        player.plays_on(3)
        for thread in threads:
            thread.join()
        assert attacked.rss() - before < 30 * MEGABYTE
        # The answers show how much of the flood was processed, at any load of this machine.
        for one in flooding:
            answered = _pongs(one)
            allowed = FRAME_RATE * (time.monotonic() - begun + BURST_S) + READ_BYTES / len(attacks.PING)
            assert 0 < answered <= allowed


def _pongs(one: socket.socket) -> int:
    """Count the answers to a flood that wait to be read."""
    one.settimeout(0.5)
    seen = b""
    with suppress(OSError):
        while more := one.recv(1 << 20):
            seen += more
    return seen.count(b"\x8a\x7d" + bytes(125))


def test_a_message_in_endless_empty_pieces_takes_no_memory(attacked: Attacked) -> None:
    """Incident: each empty continuation frame was kept in a list."""
    with Player(attacked) as player:
        before = attacked.rss()
        with attacks.handshake(attacked.address, player.session["links"]["stream"], PATIENCE_S) as one:
            one.settimeout(0.2)
            one.sendall(b"\x01\x80\0\0\0\0")
            deadline = time.monotonic() + 2.0
            with suppress(OSError):
                while time.monotonic() < deadline:
                    with suppress(TimeoutError):
                        one.sendall(b"\x00\x80\0\0\0\0" * 10_000)
            player.plays_on(1)
            assert attacked.rss() - before < 20 * MEGABYTE


def test_text_that_is_not_utf8_and_broken_origins_leave_no_traceback(attacked: Attacked) -> None:
    with Player(attacked) as player:
        path = player.session["links"]["stream"]
        with attacks.handshake(attacked.address, path, PATIENCE_S) as one:
            one.sendall(b"\x81\x82\0\0\0\0\xff\xfe")
            seen = b""
            while more := one.recv(65_536):
                seen += more
            assert b"\x03\xef" in seen  # 1007
        url = attacked.url.replace("http", "ws", 1) + path
        for origin in ("http://[", "http://[::1", "null", "http://elsewhere.example"):
            assert asyncio.run(_close_code(url, origin)) == 4403
        player.plays_on(1)
    assert "Traceback" not in attacked.pool.log(attacked.name)


async def _close_code(url: str, origin: str) -> int | None:
    patient: dict[str, Any] = {"open_timeout": PATIENCE_S, "ping_interval": None}
    async with websockets.connect(url, additional_headers={"Origin": origin}, **patient) as opened:
        with suppress(websockets.ConnectionClosed):
            while True:
                await opened.recv()
        return opened.close_code


# With chunks that fill buffers: the server alone, under an application that sends 100 kB at a time.


@contextmanager
def server(**environment: str) -> Iterator[tuple[int, attacks.Address]]:
    [port] = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "turboserve.bench.edge.serve", "gateway", str(port)],
        env={**os.environ, **SHORT, **environment},
        stderr=subprocess.DEVNULL,
    )
    try:
        address = ("127.0.0.1", port)
        eventually_blocking(lambda: attacks.answers(address, "/"), PATIENCE_S, "the server does not start")
        yield process.pid, address
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_who_does_not_read_is_cut_off_and_its_memory_freed() -> None:
    """Incident: WebSockets were kept until the kernel gave up, MP4s without a limit."""
    with server() as (pid, address), ExitStack() as held:
        before, files = attacks.rss_bytes(pid), attacks.descriptors(pid)
        for _ in range(20):
            held.enter_context(attacks.handshake(address, "/stream?interval_s=0", PATIENCE_S))
        for _ in range(20):
            one = held.enter_context(closing(attacks.connect(address, PATIENCE_S)))
            one.sendall(b"GET /stream.mp4?interval_s=0 HTTP/1.1\r\nHost: here\r\n\r\n")
            # Each is served, though the first may be cut off before the last one comes.
            assert one.recv(13).startswith(b"HTTP/1.1 200 ")
        eventually_blocking(
            lambda: attacks.descriptors(pid) < files + 20,
            PATIENCE_S,
            "clients that do not read stay connected",
        )
        assert attacks.rss_bytes(pid) - before < 40 * MEGABYTE


def test_an_address_has_its_share_and_no_more() -> None:
    limits = {
        "TURBOSERVE_CONNECTIONS_EXEMPT": "127.0.0.1/32",
        "TURBOSERVE_CONNECTIONS_PER_ADDRESS": "8",
        # None of the connections ends for another reason.
        "TURBOSERVE_HEADER_TIMEOUT_S": "3600",
    }
    with server(**limits) as (_, address), ExitStack() as held:
        greedy = [
            held.enter_context(closing(attacks.connect(address, PATIENCE_S, "127.0.0.2"))) for _ in range(12)
        ]
        eventually_blocking(
            lambda: len(attacks.still_open(greedy)) == 8, PATIENCE_S, "one address has not its share"
        )
        with closing(attacks.connect(address, PATIENCE_S, "127.0.0.2")) as refused:
            answer = refused.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b'"code":"too_many_of_address"' in answer
        # Neither another address nor an exempt one is affected.
        for source in ("127.0.0.3", "127.0.0.1"):
            with closing(attacks.connect(address, PATIENCE_S, source)) as other:
                other.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                assert other.recv(65_536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(("trusted", "seen"), [("", "127.0.0.1"), ("127.0.0.0/8", "198.51.100.7")])
def test_only_a_trusted_proxy_says_who_the_client_is(trusted: str, seen: str) -> None:
    with server(TURBOSERVE_TRUSTED_PROXIES=trusted) as (_, address):
        answer = httpx.get(
            f"http://{address[0]}:{address[1]}/client",
            headers={"X-Forwarded-For": "198.51.100.7"},
            timeout=PATIENCE_S,
        )
        assert answer.json()["client"] == seen
