"""The effect of an answer to a renewal, or of none, on the lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.helpers.other_versions import NEWER, of_version
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.clock import SystemClock
from turboserve.config import Settings
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.requests import Renew
from turboserve.contracts.versions import SCHEMA_VERSION
from turboserve.contracts.workers import LoadReport, Renewal
from turboserve.service import Runtime
from turboserve.subject_types import Caller
from turboserve.tasks import stop
from turboserve.worker.service import events
from turboserve.worker.service.heartbeat import Heartbeat
from turboserve.worker.settings import Settings as WorkerSettings

SETTINGS = WorkerSettings(heartbeat_s=0.1, request_deadline_s=0.3)


@pytest.fixture
async def buses(nats_url: str, nats_server: NatsServer) -> AsyncIterator[tuple[Bus, Bus]]:
    """A bus as the state store, and one as a worker with a short timeout."""
    store = await Bus.connect("state-store", Settings(nats_url=nats_server.url("state-store")))
    worker = await Bus.connect("worker", Settings(nats_url=nats_server.url("worker"), request_deadline_s=0.3))
    yield store, worker
    await worker.close()
    await store.close()


async def first_event(bus: Bus, seconds: float) -> events.Input | None:
    """Return the first input that the table receives within `seconds`."""
    received: asyncio.Queue[events.Input] = asyncio.Queue()
    report = LoadReport(worker="heartbeat-1", model="toyworld", capacity=1)
    heartbeat = Heartbeat(
        bus, SystemClock(), SETTINGS, lambda: report, received.put_nowait, lambda reason: None
    )
    beating = asyncio.create_task(heartbeat.run())
    try:
        async with asyncio.timeout(seconds):
            return await received.get()
    except TimeoutError:
        return None
    finally:
        await stop(beating)


async def test_no_state_store_keeps_the_lease(buses: tuple[Bus, Bus]) -> None:
    assert isinstance(await first_event(buses[1], 60.0), events.RenewalUnavailable)


async def test_a_store_without_its_database_keeps_the_lease(buses: tuple[Bus, Bus]) -> None:
    """Incident: all video stopped 8 s into an outage of Postgres, although no worker could take it over."""
    store, worker = buses

    async def renew(_: Renew, __: Caller) -> Renewal:
        raise UnavailableError("the database does not answer", retry_after_s=1.0)

    await store.serve(subjects.RENEW, renew)
    await store.flush()
    assert isinstance(await first_event(worker, 60.0), events.RenewalUnavailable)


async def test_silence_does_not_keep_the_lease(buses: tuple[Bus, Bus]) -> None:
    store, worker = buses

    async def hang(_: Renew, __: Caller) -> Renewal:
        await asyncio.sleep(60.0)
        raise AssertionError

    subscription = await store.serve(subjects.RENEW, hang)
    await store.flush()
    assert await first_event(worker, 1.5) is None
    await subscription.unsubscribe()


async def test_a_refused_version_is_no_excuse_for_the_lease_and_shows_in_readiness(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, worker = buses
    runtime = Runtime("worker", Settings(), worker)

    async def renew(request: Renew, _: Caller) -> Renewal:
        return Renewal(worker=request.load.worker)

    await store.serve(subjects.RENEW, renew)
    await store.flush()
    received: asyncio.Queue[events.Input] = asyncio.Queue()
    report = LoadReport(worker="heartbeat-1", model="toyworld", capacity=1)
    beats = 0

    def count() -> LoadReport:
        nonlocal beats
        beats += 1
        return report

    heartbeat = Heartbeat(worker, SystemClock(), SETTINGS, count, received.put_nowait, lambda reason: None)
    with monkeypatch.context() as newer:
        data = of_version(Renew(load=report), NEWER).decode()
        newer.setattr(Renew, "to_text", lambda _: data)
        beating = asyncio.create_task(heartbeat.run())
        await eventually(lambda: worker.incompatible and beats >= 4, 60.0)
        # An answer that is too late for its deadline delivers nothing either.
        assert received.empty()
        assert not heartbeat.answered
        assert runtime.checks()["schema_version"] is False
        reason = runtime.warnings()["schema_version"]
        assert "state-store refuses state.worker.renew" in reason
        assert NEWER in reason
        assert str(SCHEMA_VERSION) in reason
    try:
        async with asyncio.timeout(60.0):
            assert isinstance(await received.get(), events.Renewed)
        assert runtime.checks()["schema_version"] is True
        assert "schema_version" not in runtime.warnings()
    finally:
        await stop(beating)
