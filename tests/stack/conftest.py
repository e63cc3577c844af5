"""Fixtures of the tests of the whole stack: a client, sessions that are cleaned up, the log itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from nats.js.errors import NotFoundError

from tests.helpers.broker_clients import PATIENCE_S, connected_client
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.viewer import Viewer
from turboserve.cli.stack.background import BackgroundStack
from turboserve.contracts.chunks import ChunkHeader
from turboserve.subjects import CHUNK

Open = Callable[..., Awaitable[Viewer]]
ReadLog = Callable[[str], Awaitable[list[tuple[ChunkHeader, bytes]]]]


@pytest.fixture
async def api(stack: BackgroundStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60.0) as client:
        yield client


@pytest.fixture
async def open_session(api: httpx.AsyncClient) -> AsyncIterator[Open]:
    """Create a session. The test may end it; it is ended after the test in any case."""
    opened: list[Viewer] = []

    async def create(prompt: str = "a red circle moving left", **more: Any) -> Viewer:
        viewer = await Viewer.create(api, prompt, keep_video=True, **more)
        opened.append(viewer)
        return viewer

    yield create
    for viewer in opened:
        with suppress(ProblemError, httpx.HTTPError):
            await viewer.delete()


@pytest.fixture
def read_log(stack: BackgroundStack) -> ReadLog:
    """Read a session's chunk log in order: header, and init segment with fragment."""

    async def read(session: str) -> list[tuple[ChunkHeader, bytes]]:
        client = await connected_client(stack.record.nats_url)
        try:
            entries: list[tuple[ChunkHeader, bytes]] = []
            sequence = 1
            with suppress(NotFoundError):
                while True:
                    raw = await client.jetstream(timeout=PATIENCE_S).get_msg(
                        CHUNK.stream, seq=sequence, subject=CHUNK.of(session), direct=True, next=True
                    )
                    entries.append((ChunkHeader.from_headers(raw.headers or {}), raw.data or b""))
                    sequence = (raw.seq or 0) + 1
            return entries
        finally:
            await client.close()

    return read
