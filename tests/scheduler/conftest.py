"""The real state store and scheduler as processes, and a worker that only pretends to run sessions."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from tests.helpers.service_process import Service, connected, state_store
from tests.helpers.waiting import eventually
from tests.scheduler.scheduler_instances import Instance
from turboserve import subjects
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer, Ports
from turboserve.contracts.base import Contract
from turboserve.contracts.errors import TurboServeError, UnavailableError, WorkerGoneError
from turboserve.contracts.fidelity import SessionSlack, Tier
from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.requests import Renew, SessionRef
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import (
    Assignment,
    HeldSession,
    LoadReport,
    MigrationReport,
    MigrationStage,
    SessionRefusal,
    WorkerPhase,
)
from turboserve.ids import new_id
from turboserve.subject_types import Endpoint
from turboserve.tasks import stop

HEARTBEAT_S = 0.2
REQUEST_DEADLINE_S = 60.0
LEASE = {"TURBOSERVE_LEADER_LEASE_S": "11", "TURBOSERVE_LEADER_TIMEOUT_S": "12.5"}
"""Longer than a busy machine delays a leader: a living leader must keep the lead."""


@pytest.fixture(scope="module")
def worker_timeout_s() -> float:
    """Time without a renewal after which a worker is declared gone.

    Modules that test this use a short time of their own. Elsewhere it is long, because a busy machine is only
    slow.
    """
    return 600.0


@pytest.fixture(scope="module")
def times(worker_timeout_s: float) -> dict[str, str]:
    """Settings on which store and scheduler must agree."""
    return {
        "TURBOSERVE_HEARTBEAT_S": str(HEARTBEAT_S),
        "TURBOSERVE_LEASE_S": str(worker_timeout_s / 2),
        "TURBOSERVE_WORKER_TIMEOUT_S": str(worker_timeout_s),
        # A migration continues while the scheduler restarts, for any duration of the restart.
        "TURBOSERVE_MIGRATION_TIMEOUT_S": "600",
    }


async def until_answered(bus: Bus, endpoint: Endpoint[Any, Any], request: Contract) -> None:
    """Repeat the request until it is carried out or refused: a lost clean-up would affect the next test."""

    async def answered() -> bool:
        try:
            await bus.call(endpoint, request)
        except UnavailableError:
            return False
        except TurboServeError as refused:
            print(f"{endpoint.subject}: {refused}")
        return True

    await eventually(answered)


class QuietWorker:
    """Renews and reports as a worker does, and keeps a table of the sessions that it would run."""

    def __init__(self, bus: Bus, capacity: int, name: str | None = None) -> None:
        self.id = name or new_id("wrk")
        self.capacity = capacity
        self.phase = WorkerPhase.READY
        self.held: dict[str, SessionRecord] = {}
        self.incoming: dict[str, SessionRecord] = {}
        self.provides_state = False
        self.verifies = False
        """Whether an arriving session is copied and verified; otherwise it is copied for ever."""
        self.refuse = False
        self.renews = True
        self.reports = True
        self.reported = 0
        """Number of reports that it has published."""
        self.gone = False
        self.slacks_s: dict[str, float] = {}
        """Session → its reported playout slack, seconds. Other sessions are reported without slack."""
        self.chunk_latency_s: dict[int, float] = {}
        self._bus = bus
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._bus.subscribe(subjects.ASSIGN, self.id, self._assigned)
        self._task = asyncio.create_task(self._beat())

    async def die(self) -> None:
        assert self._task is not None
        await stop(self._task)

    @property
    def running(self) -> set[str]:
        return {name for name, record in self.held.items() if record.phase is Phase.ACTIVE}

    def report(self) -> LoadReport:
        refusals = [
            SessionRefusal(session=r.id, epoch=r.epoch, reason="told to")
            for r in self.held.values()
            if self.refuse and r.phase is Phase.ACTIVE
        ]
        return LoadReport(
            worker=self.id,
            model="quiet",
            capacity=self.capacity,
            phase=self.phase,
            sessions=tuple(
                HeldSession(
                    session=r.id,
                    epoch=r.epoch,
                    next_chunk=0,
                    resident=r.phase is Phase.ACTIVE,
                    slack=self._slack(r.id),
                )
                for r in self.held.values()
                if not self.refuse
            ),
            refusals=tuple(refusals),
            chunk_latency_s=self.chunk_latency_s,
            transfer=("quiet://",) if self.provides_state else (),
            migrations=tuple(
                MigrationReport(
                    session=r.id,
                    migration=r.migration or 0,
                    stage=MigrationStage.VERIFIED if self.verifies else MigrationStage.COPYING,
                )
                for r in self.incoming.values()
            ),
        )

    def _slack(self, session: str) -> SessionSlack | None:
        slack_s = self.slacks_s.get(session)
        if slack_s is None:
            return None
        return SessionSlack(slack_s=slack_s, credit_s=slack_s - 0.3, tier=Tier.URGENT)

    async def _assigned(self, assignment: Assignment, _body: bytes) -> None:
        self._take(assignment.record)

    def _take(self, record: SessionRecord) -> None:
        if record.worker == self.id and not record.phase.ended:
            self.held[record.id] = record
        else:
            self.held.pop(record.id, None)

    async def _beat(self) -> None:
        while True:
            try:
                if self.renews:
                    renewal = await self._bus.call(subjects.RENEW, Renew(load=self.report()))
                    self.held = {record.id: record for record in renewal.assigned}
                    self.incoming = {one.record.id: one.record for one in renewal.incoming}
                    if renewal.drain:
                        self.phase = WorkerPhase.DRAINING
                if self.reports:
                    await self._bus.publish(subjects.LOAD, self.id, self.report())
                    self.reported += 1
            except WorkerGoneError:
                self.gone = True
                return
            except TurboServeError:
                pass
            await asyncio.sleep(HEARTBEAT_S)


@pytest.fixture(scope="module")
def store(
    nats_server: NatsServer,
    nats_url: str,
    redis_url: str,
    postgres_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    times: dict[str, str],
) -> Iterator[Service]:
    """The state store on empty servers."""
    log = tmp_path_factory.mktemp("store") / "log"
    patient = {
        "TURBOSERVE_TRANSACTION_DEADLINE_S": "60",
        "TURBOSERVE_REQUEST_DEADLINE_S": "90",
        "TURBOSERVE_CANARY_TIMEOUT_S": "60",
    }
    variables = {"TURBOSERVE_IDLE_GUARD_S": "0", **patient, **times}
    service = state_store(nats_server, log, postgres_url, redis_url, **variables)
    service.start()
    yield service
    service.end()


@pytest.fixture(scope="module")
def scheduler_process(
    nats_server: NatsServer, store: Service, tmp_path_factory: pytest.TempPathFactory, times: dict[str, str]
) -> Iterator[Service]:
    service = Service(
        "scheduler",
        "turboserve.scheduler",
        nats_server,
        tmp_path_factory.mktemp("scheduler") / "log",
        TURBOSERVE_IDLE_AFTER_S="3600",
        **times,
    )
    yield service
    service.end()


@pytest.fixture
def scheduler(scheduler_process: Service) -> Iterator[Service]:
    """A running scheduler, shared by all tests that leave it running. Its log is printed."""
    scheduler_process.start()
    before = scheduler_process.logged()
    yield scheduler_process
    print(scheduler_process.logged()[len(before) :])


@pytest.fixture
def start_scheduler(
    nats_server: NatsServer,
    scheduler_process: Service,
    tmp_path_factory: pytest.TempPathFactory,
    times: dict[str, str],
) -> Iterator[Callable[..., Service]]:
    """Start schedulers of the test's own, whose logs are printed.

    The shared scheduler has given the lead back.
    """
    scheduler_process.end(signal.SIGTERM)
    started: list[Service] = []

    def start(**variables: str) -> Service:
        log = tmp_path_factory.mktemp("scheduler") / "log"
        usual = {"TURBOSERVE_IDLE_AFTER_S": "3600", **times}
        service = Service("scheduler", "turboserve.scheduler", nats_server, log, **{**usual, **variables})
        service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        service.end()
        print(service.logged())


@pytest.fixture
async def pair(start_scheduler: Callable[..., Any], ports: Ports) -> tuple[Instance, Instance]:
    """The leader, and a standby that follows it."""
    leader = Instance(start_scheduler, ports.get("standby-test-1"), **LEASE)
    await leader.becomes("ready, leader")
    standby = Instance(start_scheduler, ports.get("standby-test-2"), **LEASE)
    await standby.becomes("ready, standby")
    return leader, standby


@pytest.fixture
async def connect(nats_server: NatsServer) -> AsyncIterator[Callable[[str], Awaitable[Bus]]]:
    """Connect as a service, with its permissions."""
    async with AsyncExitStack() as stack:

        async def open_bus(name: str) -> Bus:
            bus = await connected(nats_server, name, REQUEST_DEADLINE_S)
            stack.push_async_callback(bus.close)
            return bus

        yield open_bus


@pytest.fixture
async def workers(
    connect: Callable[[str], Awaitable[Bus]],
) -> AsyncIterator[Callable[..., Awaitable[QuietWorker]]]:
    """Start quiet workers. All are declared gone at the end, so that the next test begins without any."""
    started: list[QuietWorker] = []
    bus = await connect("worker")

    async def start(capacity: int = 4) -> QuietWorker:
        worker = QuietWorker(bus, capacity)
        await worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        await worker.die()
        worker.phase = WorkerPhase.GONE
        await until_answered(bus, subjects.RENEW, Renew(load=worker.report()))


@pytest.fixture
async def until_known(connect: Callable[[str], Awaitable[Bus]]) -> Callable[[int], Awaitable[None]]:
    """Wait until the scheduler knows exactly so many workers, because it places sessions only on those."""
    known: list[int] = []

    async def hear(feedback: LoadFeedback, _body: bytes) -> None:
        if feedback.model == "quiet":
            known[:] = [feedback.workers]

    bus = await connect("autoscaler")
    await bus.subscribe(subjects.FEEDBACK, "*", hear)

    async def until(count: int) -> None:
        async def heard() -> bool:
            return known == [count]

        try:
            await eventually(heard)
        except AssertionError:
            raise AssertionError(f"the scheduler knows {known} workers, not {count}") from None

    return until


class Viewers:
    """The gateway's side: creates sessions and waits for their changes."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.made: list[str] = []

    async def create(self) -> str:
        """Create a session. Retries while there is no room or no service answers."""
        from turboserve.contracts.requests import CreateSession

        session = new_id("ses")
        request = CreateSession(id=session, tenant="t", model="quiet", prompt="a red circle", seed=1)

        async def created() -> bool:
            with suppress(TurboServeError):
                await self.bus.call(subjects.CREATE_SESSION, request)
                return True
            return False

        await eventually(created)
        self.made.append(session)
        return session

    async def get(self, session: str) -> SessionRecord:
        return await self.bus.call(subjects.GET_SESSION, SessionRef(session=session))

    async def active(self, session: str, epoch: int = 1) -> SessionRecord:
        """Wait until the session runs in `epoch` or later."""
        found: list[SessionRecord] = []

        async def is_active() -> bool:
            with suppress(TurboServeError):
                record = await self.get(session)
                found.append(record)
                return record.phase is Phase.ACTIVE and record.epoch >= epoch
            return False

        await eventually(is_active)
        return found[-1]

    async def in_phase(self, session: str, phase: Phase) -> SessionRecord:
        found: list[SessionRecord] = []

        async def is_there() -> bool:
            with suppress(TurboServeError):
                found.append(await self.get(session))
                return found[-1].phase is phase
            return False

        await eventually(is_there)
        return found[-1]


@pytest.fixture
async def viewers(connect: Callable[[str], Awaitable[Bus]]) -> AsyncIterator[Viewers]:
    from turboserve.contracts.requests import EndSession

    viewers = Viewers(await connect("gateway"))
    yield viewers
    for session in viewers.made:
        await until_answered(viewers.bus, subjects.END_SESSION, EndSession(session=session))
