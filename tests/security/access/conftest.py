"""A pool of real services, and gateways with the settings that an attack is about."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from tests.helpers.pool_harness import Pool

PATIENCE_S = 120.0


@pytest.fixture(scope="session")
def keyless_url(pool: Pool) -> str:
    """URL of a gateway as `make up` starts it."""
    url: str = pool.gateway("keyless")
    return url


Connect = Callable[..., httpx.AsyncClient]
OpenSocket = Callable[..., Any]


@pytest.fixture
async def client() -> AsyncIterator[Connect]:
    """`client(url, key)`: an HTTP client that is closed with the test."""
    made: list[httpx.AsyncClient] = []

    def make(url: str, key: str | None = None, **options: Any) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        made.append(httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S, **options))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


@pytest.fixture
def socket() -> OpenSocket:
    """`async with socket(url, session, headers, **query) as ws`: a session's stream; `name` is its Host."""

    @asynccontextmanager
    async def connect(
        url: str,
        session: str,
        headers: dict[str, str] | None = None,
        name: str | None = None,
        **query: Any,
    ) -> AsyncIterator[ClientConnection]:
        there = httpx.URL(url)
        where = f"ws://{name or there.netloc.decode()}/v1/sessions/{session}/stream"
        async with websockets.connect(
            str(httpx.URL(where, params=query)),
            host=there.host,
            port=there.port,
            max_size=None,
            additional_headers=headers or {},
            open_timeout=PATIENCE_S,
            # All messages are received at once: the gateway disconnects clients that do not answer its pings.
            max_queue=None,
            ping_interval=None,
        ) as opened:
            yield opened

    return connect
