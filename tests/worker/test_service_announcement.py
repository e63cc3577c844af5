"""A worker that loads its model is known, and accepts no session yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.clock import SystemClock
from turboserve.config import Settings as Shared
from turboserve.contracts.errors import WorkerGoneError
from turboserve.contracts.requests import Renew
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming, LoadReport, MigrationStage, Renewal, WorkerPhase
from turboserve.subject_types import Caller
from turboserve.worker.service.heartbeat import announced, starting
from turboserve.worker.settings import Settings


class Store:
    """Answers renewals, each after `takes_s`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.heard: list[Renew] = []
        self.renewed = asyncio.Event()
        self.takes_s = 0.0
        self.says_gone = False
        self.assigned: tuple[SessionRecord, ...] = ()
        self.incoming: tuple[Incoming, ...] = ()

    async def renew(self, request: Renew, _: Caller) -> Renewal:
        if request.load.phase is not WorkerPhase.GONE and self.says_gone:
            raise WorkerGoneError("it was declared gone", field="worker")
        self.asked.set()
        await asyncio.sleep(self.takes_s)
        self.heard.append(request)
        self.renewed.set()
        return Renewal(worker=request.load.worker, assigned=self.assigned, incoming=self.incoming)

    @property
    def phases(self) -> list[WorkerPhase]:
        return [request.load.phase for request in self.heard]


@pytest.fixture
async def store(nats_url: str, nats_server: NatsServer) -> AsyncIterator[Store]:
    bus = await Bus.connect("state-store", Shared(nats_url=nats_server.url("state-store")))
    store = Store()
    await bus.serve(subjects.RENEW, store.renew)
    await bus.flush()
    yield store
    await bus.close()


@asynccontextmanager
async def loading(nats_server: NatsServer, gone: list[str]) -> AsyncIterator[None]:
    settings = Settings(nats_url=nats_server.url("worker"), heartbeat_s=0.1, pool_member="local-0")
    bus = await Bus.connect("worker", settings)
    report = starting("loading-1", settings, "cpu", pid=1, now=5.0)
    try:
        async with announced(report, settings, bus, SystemClock(), gone.append):
            yield
    finally:
        await bus.close()


async def test_it_says_that_it_starts_until_it_has_loaded(store: Store, nats_server: NatsServer) -> None:
    async with loading(nats_server, []):
        for _ in range(2):
            store.renewed.clear()
            await store.renewed.wait()
        # Under way when loading ends: it finishes before any other report is sent.
        store.takes_s = 0.3
        store.asked.clear()
        await store.asked.wait()
    said, count = store.heard[0].load, len(store.heard)
    assert set(store.phases) == {WorkerPhase.STARTING}
    assert (said.capacity, said.device, said.pool_member, said.started_at) == (0, "cpu", "local-0", 5.0)
    # The store answers a later renewal of another worker after everything that it received before.
    settings = Settings(nats_url=nats_server.url("worker"), request_deadline_s=60.0)
    bus = await Bus.connect("worker", settings)
    try:
        await bus.call(subjects.RENEW, Renew(load=starting("marker", settings, "cpu", pid=2, now=6.0)))
    finally:
        await bus.close()
    assert [request.load.worker for request in store.heard[count:]] == ["marker"]


async def test_it_leaves_if_it_cannot_load(store: Store, nats_server: NatsServer) -> None:
    with suppress(ValueError):
        async with loading(nats_server, []):
            await store.renewed.wait()
            raise ValueError("a checkpoint that is none")
    # It does not wait for the answer to its final report.
    await eventually(lambda: WorkerPhase.GONE in store.phases, 60)
    assert store.phases[-1] is WorkerPhase.GONE
    assert store.phases.count(WorkerPhase.GONE) == 1


async def test_what_the_process_before_it_had_is_refused_as_long_as_rows_name_it(
    store: Store, nats_server: NatsServer
) -> None:
    """The process restarted at once under the same id: other workers need not wait until it has loaded."""
    row = SessionRecord.model_validate(
        {"id": "s1", "tenant": "t", "model": "toyworld", "prompt": "p", "seed": 7, "phase": Phase.ACTIVE}
        | {"version": 3, "epoch": 2, "worker": "loading-1", "created_at": 0, "updated_at": 0}
    )
    suspended = row.model_copy(update={"id": "s2", "phase": Phase.SUSPENDED})
    coming = row.model_copy(update={"id": "s3", "worker": "other", "target": "loading-1", "migration": 5})
    store.assigned, store.incoming = (row, suspended), (Incoming(record=coming),)

    async def until(refused: list[tuple[str, int]]) -> LoadReport:
        async with asyncio.timeout(60):
            while True:
                store.renewed.clear()
                await store.renewed.wait()
                load = store.heard[-1].load
                if [(one.session, one.epoch) for one in load.refusals] == refused:
                    return load

    async with loading(nats_server, []):
        load = await until([("s1", 2)])
        assert [(one.session, one.migration, one.stage) for one in load.migrations] == [
            ("s3", 5, MigrationStage.FAILED)
        ]
        assert load.phase is WorkerPhase.STARTING
        store.assigned, store.incoming = (), ()
        assert (await until([])).migrations == ()


async def test_it_hears_that_it_was_declared_gone(store: Store, nats_server: NatsServer) -> None:
    store.says_gone, gone = True, list[str]()
    async with loading(nats_server, gone):
        await eventually(lambda: gone, 60)


def test_a_worker_of_several_models_names_them_while_it_loads() -> None:
    several = starting("w", Settings(model="toyworld,toyworld-small"), "cpu", pid=1, now=5.0)
    assert several.classes is not None
    assert [(one.model, one.capacity) for one in several.classes] == [("toyworld", 0), ("toyworld-small", 0)]
    assert starting("w", Settings(), "cpu", pid=1, now=5.0).classes is None
