"""The state store in the test's own process, on real servers; as a process if it must be killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import turboserve.bus.log
import turboserve.state_store.composition
import turboserve.state_store.database
import turboserve.state_store.hot.redis
import turboserve.state_store.hot.session_state
import turboserve.state_store.publish.fence
import turboserve.state_store.service.transactions
from tests.state_store.database_servers import KINDS, DatabaseServer
from tests.state_store.state_store_harness import LIMIT_S, MEMORY_URL, PATIENT, Harness, Store
from turboserve.bus import Bus, append
from turboserve.clock import SystemClock
from turboserve.state_store.ports.database import Database
from turboserve.state_store.settings import Settings


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a module with `SERVERS` on each of them, except for tests that need the real servers."""
    kinds = getattr(metafunc.module, "SERVERS", None)
    if kinds is not None and "servers" in metafunc.fixturenames:
        if metafunc.definition.get_closest_marker("real_servers"):
            kinds = ("real",)
        metafunc.parametrize("servers", kinds, indirect=True, scope="module")


StartStore = Callable[..., Awaitable[Store]]


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Addresses of the real servers, or of servers in memory."""
    if getattr(request, "param", "real") == "memory":
        return {"nats_url": MEMORY_URL}
    return {name: request.getfixturevalue(name) for name in ("nats_url", "redis_url", "postgres_url")}


@pytest.fixture(scope="module")
def settings(servers: dict[str, Any]) -> Settings:
    return Settings(
        **servers,
        sweep_s=0.2,
        purge_s=3_600.0,
        # A busy machine is only slow: admission is refused only if the broker refuses.
        canary_timeout_s=60.0,
        # The same holds for an instance that is stuck for some seconds. Tests of deadlines set their own.
        **PATIENT,
        # Workers of these tests renew once, and viewers report once.
        worker_timeout_s=3_600.0,
        idle_guard_s=3_600.0,
        # Tests fill their own small pools, and earlier tests have left other tenants.
        tenant_slots_factor=0.0,
        log_level="WARNING",
    )


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the deadlines that are no settings to those of `PATIENT`.

    In a module with `OUTAGES`, servers hang: the steps after a commit, and Redis, keep their own deadlines.
    """
    monkeypatch.setattr(turboserve.bus.log, "DIRECT_GET_S", LIMIT_S)
    # A renewal is answered within this share of a third of the lease.
    monkeypatch.setattr(turboserve.state_store.composition, "ANSWERED", LIMIT_S)
    monkeypatch.setattr(Bus.jetstream, "__defaults__", (LIMIT_S,))
    defaults = append.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "deadline_s", LIMIT_S)
    if not getattr(request.module, "OUTAGES", False):
        # After a short one, a sweep writes the fence later, and former owners are not informed.
        monkeypatch.setattr(turboserve.state_store.service.transactions, "FENCE_TIMEOUT_S", LIMIT_S)
        monkeypatch.setattr(turboserve.state_store.publish.fence, "APPEND_S", LIMIT_S)
        monkeypatch.setattr(turboserve.state_store.hot.session_state, "ATTEMPT_S", LIMIT_S)
        monkeypatch.setattr(turboserve.state_store.hot.redis, "DEADLINE_S", LIMIT_S)


@pytest.fixture
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the wall clock of stores in this process, by which rates are filled up again."""
    now = time.time()
    monkeypatch.setattr(SystemClock, "wall", staticmethod(lambda: now))


_compiled: list[tuple[Any, Any]] = []
"""The dialect of the first engine that has connected, and its cache of compiled statements."""


def _sharing_engine(url: str, **options: Any) -> AsyncEngine:
    engine = create_async_engine(url, **options)
    sync: Any = engine.sync_engine

    def connected(*_: object) -> None:
        if not _compiled:
            _compiled.append((sync.dialect, sync._compiled_cache))

    if _compiled:
        # A statement is compiled for one dialect.
        sync.dialect, sync._compiled_cache = _compiled[0]
    else:
        event.listen(sync, "connect", connected)
    return engine


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let instances share compiled statements: each test starts one, which would compile its own."""
    monkeypatch.setattr(turboserve.state_store.database, "create_async_engine", _sharing_engine)


@pytest.fixture
async def start_store(settings: Settings) -> AsyncIterator[StartStore]:
    """Start one more instance, with changed settings. All are stopped at the end."""
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> Store:
            return await stack.enter_async_context(Store.running(settings.model_copy(update=changes)))

        yield start


@pytest.fixture
async def store(start_store: StartStore) -> Store:
    return await start_store()


@pytest.fixture
async def api(store: Store, settings: Settings) -> AsyncIterator[Harness]:
    """Calls the store as the other services do."""
    async with Harness.connected(settings) as harness:
        yield harness
        await asyncio.sleep(0)


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    """URL of Postgres; None stands for the database in memory."""
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else None


@pytest.fixture
async def server(database_url: str | None) -> AsyncIterator[DatabaseServer]:
    """Postgres, and then the database in memory."""
    kind = "memory" if database_url is None else "postgres"
    async with DatabaseServer.running(kind, database_url) as server:
        yield server


@pytest.fixture
def database(server: DatabaseServer) -> Database:
    """One instance's connections to the server."""
    return server.connect()
