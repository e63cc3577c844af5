"""A pool of real services, and gateways with the settings that an attack is about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from tests.helpers.pool_harness import Pool
from tests.helpers.stored_keys import StoredKeyText, store_keys
from tests.helpers.waiting import eventually
from turboserve.contracts.keys import Scope

PATIENCE_S = 120.0
ADMIN = "the-first-key-of-all-keys"
"""A key of the database with the scope `admin`."""
NEW = {"tenant": "acme", "scopes": [Scope.SESSIONS_READ.value, Scope.SESSIONS_WRITE.value]}
"""Body of a request for a key."""


@pytest.fixture
def keyless_url(gateway_url: str) -> str:
    """URL of a gateway as `make up` starts it."""
    return gateway_url


Connect = Callable[..., httpx.AsyncClient]
OpenSocket = Callable[..., Any]
Create = Callable[..., Any]


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


@pytest.fixture(scope="session")
def urls(pool: Pool) -> list[str]:
    """Addresses of two gateways whose keys are in the database."""
    keys = [StoredKeyText("first", "ops", ADMIN, [Scope.ADMIN])]
    asyncio.run(store_keys(pool.nats, keys))
    return [pool.gateway(f"stored_{n}", TURBOSERVE_API_KEYS_STORE="1", DRAWN_KEY=ADMIN) for n in range(2)]


@pytest.fixture
def admin(urls: list[str], client: Connect) -> httpx.AsyncClient:
    return client(urls[0], ADMIN)


@pytest.fixture
def create(admin: httpx.AsyncClient) -> Create:
    """`await create(**fields)`: a new key, as the API answers."""

    async def one(**fields: Any) -> dict[str, Any]:
        answer = await admin.post("/v1/keys", json={**NEW, **fields})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    return one


async def accepted(url: str, key: str, wanted: bool, client: Connect) -> None:
    """Wait until the gateway accepts the key, or refuses it."""
    api = client(url, key)

    async def so() -> bool:
        answer = await api.get("/v1/sessions")
        assert answer.status_code in (200, 401, 429), answer.text
        return (answer.status_code == 200) == wanted

    await eventually(so)
