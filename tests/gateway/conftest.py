"""Clients of a gateway that serves a pool of real services."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from tests.helpers.pool_harness import Pool
from tests.helpers.reporting_autoscaler import ReportingAutoscaler
from tests.helpers.service_process import connected
from tests.helpers.stream_protocol import check_sent
from tests.helpers.waiting import eventually
from turboserve.contracts.requests import FailSession
from turboserve.subjects import FAIL_SESSION

PATIENCE_S = 120.0


@pytest.fixture
async def api(gateway_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway_url, timeout=PATIENCE_S) as client:
        yield client


StartSession = Callable[..., Awaitable[dict[str, Any]]]


@pytest.fixture
async def autoscaler(pool: Pool, api: httpx.AsyncClient) -> AsyncIterator[ReportingAutoscaler]:
    """Publishes reports of pools, as an autoscaler's user, to the gateway at `api`."""
    bus = await connected(pool.nats, "autoscaler", request_deadline_s=60)
    yield ReportingAutoscaler(bus, api)
    await bus.close()


@pytest.fixture
async def start(api: httpx.AsyncClient) -> AsyncIterator[StartSession]:
    """`await start(prompt="…")` creates a session. All end with the test, so that the next test has room."""
    made: list[str] = []

    async def create(prompt: str = "a red circle", **more: Any) -> dict[str, Any]:
        answer = await api.post("/v1/sessions", json={"prompt": prompt, **more})
        assert answer.status_code == 201, answer.text
        session: dict[str, Any] = answer.json()
        made.append(session["id"])
        return session

    yield create
    for session in made:
        await api.delete(f"/v1/sessions/{session}")


FailSessionOf = Callable[[str, str], Awaitable[None]]


@pytest.fixture
async def fail(pool: Pool, api: httpx.AsyncClient) -> AsyncIterator[FailSessionOf]:
    """`await fail(session, reason)` ends a session as its worker does that cannot go on with it."""
    bus = await connected(pool.nats, "worker", request_deadline_s=60)

    async def end(session: str, reason: str) -> None:
        row: dict[str, Any] = {}

        async def is_owned() -> bool:
            row.update((await api.get(f"/v1/sessions/{session}")).json())
            return row["worker"] is not None

        await eventually(is_owned)
        await bus.call(
            FAIL_SESSION,
            FailSession(session=session, epoch=row["epoch"], worker=row["worker"], reason=reason),
        )

    yield end
    await bus.close()


class Viewer:
    """One WebSocket. Reads messages in order, each with its binary message."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []
        self.init = b""
        self.reports = True

    async def next(self) -> dict[str, Any]:
        """Return the next JSON message; `data` is the binary that it announces.

        Checks the message against the AsyncAPI document. Reports a playhead per chunk, unless `reports` is
        False.
        """
        message: dict[str, Any] = json.loads(await self.socket.recv(decode=True))
        check_sent(message)
        if message["type"] in ("init", "chunk"):
            data = await self.socket.recv()
            assert isinstance(data, bytes)
            assert len(data) == message["bytes"]
            message["data"] = data
        if message["type"] == "init":
            self.init = message["data"]
        if message["type"] == "chunk" and self.reports:
            with suppress(websockets.ConnectionClosed):
                await self.say(
                    type="playhead", playhead_s=message["start_s"], buffered_s=message["duration_s"]
                )
        self.seen.append(message)
        return message

    async def until(self, type_: str, **having: Any) -> dict[str, Any]:
        """Return the next message of this type with these values."""
        while True:
            message = await self.next()
            if message["type"] == type_ and all(message.get(key) == value for key, value in having.items()):
                return message

    async def closed(self) -> int:
        """Read to the end. Returns the code with which the gateway closed."""
        with suppress(websockets.ConnectionClosed):
            while True:
                await self.next()
        assert self.socket.close_code is not None
        return self.socket.close_code

    async def chunks(self, count: int) -> list[dict[str, Any]]:
        return [await self.until("chunk") for _ in range(count)]

    async def say(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))


Watch = Callable[..., Awaitable[Viewer]]


@pytest.fixture
async def watch(gateway_url: str) -> AsyncIterator[Watch]:
    """`await watch(session, after=3)` opens a stream."""
    opened: list[ClientConnection] = []

    async def connect(session: str, url: str = gateway_url, key: str | None = None, **query: Any) -> Viewer:
        address = httpx.URL(url.replace("http", "ws", 1) + f"/v1/sessions/{session}/stream", params=query)
        # All messages are received at once, read or not: the gateway disconnects clients that do not answer
        # its pings.
        socket = await websockets.connect(
            str(address),
            additional_headers={} if key is None else {"Authorization": f"Bearer {key}"},
            max_size=None,
            max_queue=None,
            open_timeout=PATIENCE_S,
            ping_interval=None,
        )
        opened.append(socket)
        return Viewer(socket)

    yield connect
    for socket in opened:
        await socket.close()


@pytest.fixture(scope="module")
def recorder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recorder beside the pool's services; its folder."""
    folder = tmp_path_factory.mktemp("recordings")
    pool.start(
        "recorder",
        "turboserve.recorder",
        {
            "TURBOSERVE_RECORDINGS_URL": f"file:{folder}",
            "TURBOSERVE_RECORDING_SEGMENT_S": "1.5",
            "TURBOSERVE_RECORDING_POLL_S": "0.1",
            "TURBOSERVE_REQUEST_DEADLINE_S": "30",
        },
    )
    yield folder
    pool.stop("recorder")
