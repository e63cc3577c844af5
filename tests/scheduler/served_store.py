"""The state store's own service beside a virtual world: on servers in memory, each call takes no time."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import EndSession, Renew, SessionRef
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerRecord
from turboserve.scheduler.executor import Executor
from turboserve.scheduler.messages import Command, Event
from turboserve.service import Runtime
from turboserve.simulation.runtime.broker import MemoryBroker
from turboserve.simulation.runtime.hot import MemoryHotStore, MemoryRedis
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.process import Process
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.state_store.composition import compose
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.ports.records import LogProgress
from turboserve.state_store.settings import Settings
from turboserve.subject_types import Endpoint

WALL = 1_700_000_000.0
URL = "nats://{}@memory"
# Periodic tasks that no test here examines run seldom.
SETTINGS = Settings(
    nats_url=URL.format("state-store"),
    canary_interval_s=1_000.0,
    canary_timeout_s=10_000.0,
    sweep_s=10.0,
    purge_s=10_000.0,
    cost_sample_s=1_000.0,
    idle_guard_s=0.0,
)

T = TypeVar("T")
Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)
OnSession = Callable[[SessionRecord | None, SessionRecord], None]
OnWorker = Callable[[WorkerRecord | None, WorkerRecord], None]


class ServedStore:
    """One instance of the service. Its clock is the world's."""

    def __init__(
        self, seed: int, now: Callable[[], float], on_session: OnSession, on_worker: OnWorker
    ) -> None:
        """Create the store.

        `now` returns virtual seconds. `on_session` and `on_worker` are called at each commit, with the row
        before and after.
        """
        self._now, self._on_session, self._on_worker = now, on_session, on_worker
        self.loop = VirtualLoop(seed)
        self._broker = MemoryBroker(random.Random(seed), loop=self.loop)
        self._postgres = MemoryPostgres(loop=self.loop)
        self._postgres.on_commit = self._committed
        self._redis = MemoryRedis(loop=self.loop)
        self._database = self._in(Process("tables"), self._connect())
        self._in(Process("state-store"), self._serve())
        self._scheduler: Bus = self._in(Process("scheduler"), self._bus("scheduler"))
        self._worker: Bus = self._in(Process("worker"), self._bus("worker"))
        self._gateway: Bus = self._in(Process("gateway"), self._bus("gateway"))
        self._executor = Executor(self._scheduler, self)

    # The clock

    def monotonic(self) -> float:
        return self._now()

    def wall(self) -> float:
        return WALL + self._now()

    # What others ask

    def run(self, command: Command) -> Event | None:
        """Carry out the scheduler's command, as its shell does."""
        return self._call(self._executor.run(command))

    def renew(self, load: LoadReport) -> bool:
        """Renew a worker. Returns whether it is not gone."""
        return self._ask(self._worker, subjects.RENEW, Renew(load=load)) is not None

    def create(self, request: Any, *, admit: bool) -> bool:
        """Create a session.

        Returns whether it was admitted; with `admit`, it is written without a request.
        """
        if admit:
            self._call(self._insert(request))
            return True
        return self._ask(self._gateway, subjects.CREATE_SESSION, request) is not None

    def pause(self, session: str) -> None:
        self._ask(self._gateway, subjects.PAUSE_SESSION, SessionRef(session=session))

    def resume(self, session: str) -> None:
        self._ask(self._gateway, subjects.RESUME_SESSION, SessionRef(session=session))

    def end(self, session: str) -> None:
        self._ask(self._gateway, subjects.END_SESSION, EndSession(session=session))

    def count_chunk(self, session: str, next_chunk: int) -> None:
        """Count a further chunk of the session in the log."""
        self._call(self._count(LogProgress(session, next_chunk, 0, None)))

    def close(self) -> None:
        self.loop.close()

    # Inside

    async def _connect(self) -> MemoryDatabase:
        return MemoryDatabase(self._postgres)

    async def _bus(self, service: str) -> Bus:
        return await Bus.connect(service, Settings(nats_url=URL.format(service)), self._broker.connect)

    async def _serve(self) -> None:
        bus = await self._bus("state-store")
        runtime = Runtime("state-store", SETTINGS, bus, self)
        await compose(runtime, SETTINGS, MemoryDatabase(self._postgres), MemoryHotStore(self._redis))
        await bus.flush()

    async def _insert(self, request: Any) -> None:
        async with self._database.transaction() as db:
            await db.changes.create(rules.create(request, self.wall()))

    async def _count(self, reached: LogProgress) -> None:
        async with self._database.transaction() as db:
            await db.progress.count([reached])

    def _ask(self, bus: Bus, endpoint: Endpoint[Req, Resp], request: Req) -> Resp | None:
        """Call the endpoint. Returns the answer; None if it was refused."""
        try:
            return self._call(bus.call(endpoint, request))
        except TurboServeError:
            return None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        # The service's periodic work is done first.
        if self._now() > self.loop.time():
            self.loop.advance(self._now() - self.loop.time())
        return self.loop.run_until_complete(self.loop.create_task(work))

    def _in(self, process: Process, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(self.loop.spawn(process, work))

    def _committed(self, table: Any, key: Any, before: Any, after: Any) -> None:
        if after is None or table.name not in ("sessions", "workers"):
            return
        record = None if before is None else before.record
        if table.name == "sessions" and (record is None or record.version != after.record.version):
            self._on_session(record, after.record)
        elif table.name == "workers":
            self._on_worker(record, after.record)
