"""A bus per service: on a real broker, with the permissions of the table of subjects, or in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from nats.aio.client import Client

from turboserve.bus import Bus, append, log, pages
from turboserve.cli.embedded import NatsServer
from turboserve.config import Settings
from turboserve.simulation.runtime.broker import MemoryBroker

Connect = Callable[[str], Awaitable[Bus]]
LIMIT_S = 60.0


def client_of(bus: Bus) -> Client:
    """Return the client of nats-py of `bus`; that of the broker in memory is one as well."""
    assert isinstance(bus.client, Client)
    return bus.client


@pytest.fixture(autouse=True)
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the default time limits: answers of a busy machine may take long."""
    defaults = append.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "deadline_s", LIMIT_S)
    monkeypatch.setattr(Bus.jetstream, "__defaults__", (LIMIT_S,))


@pytest.fixture
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits of reads. Not for tests that delete a stream during a read: it gets no answer."""
    monkeypatch.setattr(log, "DIRECT_GET_S", LIMIT_S)
    monkeypatch.setattr(pages, "PAGE_TIMEOUT_S", LIMIT_S)


@pytest.fixture(params=["nats", "memory"])
def real_server(request: pytest.FixtureRequest) -> NatsServer | None:
    """nats-server without streams; None stands for the broker in memory."""
    if request.param == "memory":
        return None
    request.getfixturevalue("nats_url")
    server: NatsServer = request.getfixturevalue("nats_server")
    return server


@pytest.fixture
async def connect(real_server: NatsServer | None) -> AsyncIterator[Connect]:
    """`await connect("gateway")`: a bus as that service; `admin` may do everything.

    Each test that uses it checks both nats-server and the broker on which the simulation runs.
    """
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:

        async def one(service: str) -> Bus:
            if real_server is not None:
                bus = await Bus.connect(
                    service, Settings(nats_url=real_server.url(service), request_deadline_s=LIMIT_S)
                )
            else:
                settings = Settings(nats_url=f"nats://{service}@memory", request_deadline_s=LIMIT_S)
                bus = await Bus.connect(service, settings, broker.connect)
            stack.push_async_callback(bus.close)
            return bus

        yield one
