"""A rolling upgrade of one MINOR: services of two schema versions serve a session together.

Services of the older version are processes whose messages all pass through the older checked-in schema set
(`schema_peer.py`). Broker, Postgres, Redis, state store, scheduler and workers are real. The test is the
gateway.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis

from tests.helpers.schema_peer import REFUSED
from tests.helpers.service_process import Service, connected, readiness, state_store
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.bus import Bus, next_entry
from turboserve.cli.embedded import NatsServer, Ports
from turboserve.cli.reference.schemas import checked_in, file_of
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import (
    CreateSession,
    EndSession,
    MigrateSession,
    SessionRef,
    SetControl,
    SubmitPrompt,
)
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.versions import MEMBER, SCHEMA_VERSION, SchemaVersion
from turboserve.contracts.workers import Playhead
from turboserve.ids import new_id

T = TypeVar("T")
DOCS = Path(__file__).parents[2] / "docs"
OF_THIS_MAJOR = [version for version in checked_in(DOCS) if version.major == SCHEMA_VERSION.major]
NEW = SCHEMA_VERSION
OLD = SchemaVersion(NEW.major, NEW.minor - 1)
TINY_WORKER = str(Path(__file__).parents[1] / "worker" / "tiny_worker.py")
PATIENT = {
    "TURBOSERVE_HEARTBEAT_S": "0.3",
    "TURBOSERVE_LEASE_S": "300",
    "TURBOSERVE_WORKER_TIMEOUT_S": "600",
    "TURBOSERVE_MIGRATION_TIMEOUT_S": "600",
    "TURBOSERVE_MIGRATION_QUIESCE_MAX_S": "90",
    "TURBOSERVE_IDLE_AFTER_S": "3600",
    "TURBOSERVE_REBALANCE": "false",
    "TURBOSERVE_TRANSACTION_DEADLINE_S": "60",
    "TURBOSERVE_CANARY_TIMEOUT_S": "60",
    "TURBOSERVE_REQUEST_DEADLINE_S": "90",
    "TURBOSERVE_LEADER_RENEW_S": "2",
    "TURBOSERVE_LEADER_LEASE_S": "60",
    "TURBOSERVE_LEADER_TIMEOUT_S": "75",
    "TURBOSERVE_LOG_FORMAT": "json",
    "OMP_NUM_THREADS": "1",
}
"""A busy machine is only slow."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(OLD not in OF_THIS_MAJOR, reason="the MAJOR has only one MINOR"),
]

COMBINATIONS = {
    "old workers, new scheduler and store": {"worker-1", "worker-2"},
    "new workers, old scheduler and store": {"scheduler", "state-store"},
    "one old worker": {"worker-1"},
}
"""Which services are of the older version."""


class Deployment:
    """State store, scheduler and two workers, each of the older or of the newer version."""

    def __init__(self, nats: NatsServer, ports: Ports, folder: Path, old: set[str], **servers: str) -> None:
        self._folder, self._old = folder, old
        self.health = {name: ports.get(f"rolling-{name}") for name in ("scheduler", "worker-1", "worker-2")}
        self.services: dict[str, Service] = {}
        variables = {**PATIENT, "TURBOSERVE_IDLE_GUARD_S": "0"}
        store = state_store(
            nats, self._log("state-store"), servers["postgres"], servers["redis"], **variables
        )
        self._start("state-store", store)
        self._start("scheduler", self._service(nats, "scheduler", "turboserve.scheduler"))
        for name in ("worker-1", "worker-2"):
            self._start(name, self._service(nats, name, TINY_WORKER))

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _service(self, nats: NatsServer, name: str, module: str) -> Service:
        port = {"TURBOSERVE_HEALTH_PORT": str(self.health[name])}
        if module == TINY_WORKER:
            port |= {"TURBOSERVE_WORKER_ID": self.worker(name), "TURBOSERVE_WORKER_MAX_SESSIONS": "2"}
        user = name.partition("-")[0]
        return Service(user, module, nats, self._log(name), **PATIENT, **port)

    def _start(self, name: str, service: Service) -> None:
        if name in self._old:
            service.of_version(file_of(OLD, DOCS))
        self.services[name] = service
        service.start()

    def worker(self, name: str) -> str:
        return f"wrk_{self._folder.name.replace('-', '_')}_{name[-1]}"

    def end(self) -> None:
        # The scheduler gives its leadership back: the next test's would wait for its lease.
        self.services["scheduler"].end(signal.SIGTERM)
        for service in self.services.values():
            service.end()

    def logged(self) -> str:
        return "\n".join(f"--- {name}\n{one.logged()[-6_000:]}" for name, one in self.services.items())

    def ready(self, name: str) -> dict[str, Any]:
        """Return the answer of /readyz; empty if the service does not answer at the moment."""
        return readiness(self.health[name])


@pytest.fixture(params=list(COMBINATIONS.values()), ids=list(COMBINATIONS))
def deployment(
    request: pytest.FixtureRequest,
    nats_server: NatsServer,
    nats_url: str,
    redis_url: str,
    new_database: Callable[[], str],
    ports: Ports,
    tmp_path: Path,
) -> Iterator[Deployment]:
    del nats_url  # The streams of earlier tests are deleted.
    # Killed workers of an earlier test would be alive in its database until their time-out.
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    folder = tmp_path / f"run{len(request.param)}{min(request.param)[0]}"
    folder.mkdir()
    deployment = Deployment(
        nats_server, ports, folder, request.param, postgres=new_database(), redis=redis_url
    )
    try:
        yield deployment
    finally:
        deployment.end()
        print(deployment.logged())


@pytest.fixture
async def gateway(nats_server: NatsServer) -> AsyncIterator[Bus]:
    bus = await connected(nats_server, "gateway", 60.0)
    yield bus
    await bus.close()


class Viewer:
    """Creates a session as the gateway does, watches it, and reads its log."""

    def __init__(self, bus: Bus, deployment: Deployment) -> None:
        self._bus, self._deployment = bus, deployment
        self.session = new_id("ses")
        self.headers: list[ChunkHeader] = []
        self.versions: dict[str, set[str]] = {}
        """Versions on chunks, by worker."""
        self._sequence = 1

    async def create(self) -> SessionRecord:
        request = CreateSession(id=self.session, tenant="t", model="toyworld", prompt="a red circle", seed=1)
        return await self.until_answered(lambda: self._bus.call(subjects.CREATE_SESSION, request))

    async def until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request until it is carried out: services start, and workers join."""
        found: list[T] = []
        refusals: list[str] = []

        async def answered() -> bool:
            try:
                found.append(await ask())
            except TurboServeError as error:
                refusals.append(error.detail)
                await asyncio.sleep(0.2)
                return False
            return True

        try:
            await eventually(answered, 120.0)
        except AssertionError:
            raise AssertionError(f"{refusals[-1:]}\n{self._deployment.logged()}") from None
        return found[0]

    async def record(self) -> SessionRecord:
        request = SessionRef(session=self.session)
        record: SessionRecord = await self.until_answered(
            lambda: self._bus.call(subjects.GET_SESSION, request)
        )
        return record

    async def watch(
        self, condition: Callable[[SessionRecord], bool], ask: Callable[[], Awaitable[Any]] | None = None
    ) -> SessionRecord:
        """Watch until `condition` holds for the row. The chunks in the log have to be contiguous.

        `ask` is repeated while the session is active: a busy machine loses answers and breaks off migrations.
        """
        found: list[SessionRecord] = []

        async def holds() -> bool:
            await self._read()
            found.append(await self.record())
            if condition(found[-1]):
                # Chunks that the row counts may have come after the log was read.
                await self._read()
                return True
            if ask is not None and found[-1].phase is Phase.ACTIVE:
                with suppress(TurboServeError):
                    await ask()
            return False

        try:
            await eventually(holds, 120.0)
        except AssertionError:
            raise AssertionError(f"{found[-1:]}\n{self._deployment.logged()}") from None
        return found[-1]

    async def play(self, chunks: int) -> SessionRecord:
        """Watch until the log has so many more chunks."""
        goal = len(self.headers) + chunks
        return await self.watch(lambda _: len(self.headers) >= goal)

    async def _read(self) -> None:
        with suppress(TurboServeError):
            while True:
                subject = subjects.CHUNK.of(self.session)
                entry = await next_entry(self._bus, subjects.CHUNKS, subject, self._sequence)
                if entry is None:
                    break
                self._sequence = entry.sequence + 1
                header = ChunkHeader.from_headers(entry.headers)
                assert header.index == len(self.headers)
                self.headers.append(header)
                version = json.loads(entry.headers["Ts-Chunk"])[MEMBER]
                self.versions.setdefault(header.worker, set()).add(version)
        at = max(0.0, self.headers[-1].end_s - 1.0) if self.headers else 0.0
        await self._bus.publish(
            subjects.PLAYHEAD, self.session, Playhead(session=self.session, playhead_s=at, viewers=1)
        )


def runs_at(worker: str, row: SessionRecord) -> bool:
    return row.worker == worker and row.phase is Phase.ACTIVE


def newest_are_of(viewer: Viewer, epoch: int, _row: SessionRecord) -> bool:
    return [header.epoch for header in viewer.headers[-2:]] == [epoch] * 2


async def test_a_session_plays_is_prompted_and_migrates_between_versions(
    deployment: Deployment, gateway: Bus, request: pytest.FixtureRequest
) -> None:
    old: set[str] = request.node.callspec.params["deployment"]
    names = {deployment.worker(name): name for name in ("worker-1", "worker-2")}
    viewer = Viewer(gateway, deployment)

    async def both_joined() -> bool:
        ready = await asyncio.gather(*(asyncio.to_thread(deployment.ready, name) for name in names.values()))
        return all(one.get("status") == "ready" for one in ready)

    await eventually(both_joined, 120.0)
    await viewer.create()
    await viewer.watch(lambda row: row.phase is Phase.ACTIVE)
    first = (await viewer.play(3)).worker
    prompt = SubmitPrompt(session=viewer.session, prompt_id=new_id("prm"), prompt="a green square")
    receipt = await viewer.until_answered(lambda: gateway.call(subjects.SUBMIT_PROMPT, prompt))
    await viewer.watch(lambda row: row.applied_control_seq >= receipt.control_seq)
    assert viewer.headers[-1].control_seq == receipt.control_seq

    # A store or an owner of the older version refuses controls. The session goes on in any case.
    control = SetControl(session=viewer.session, control_id=new_id("ctl"), name="steer", value="left")
    if "state-store" in old or names[str(first)] in old:
        with pytest.raises(TurboServeError):
            await gateway.call(subjects.SET_CONTROL, control)
    else:
        accepted = await viewer.until_answered(lambda: gateway.call(subjects.SET_CONTROL, control))
        row = await viewer.watch(lambda row: row.applied_control_seq >= accepted.control_seq)
        assert row.controls == {"steer": "left"}

    # There and back, so that each version is the source of one migration and the target of the other.
    source, length = first, 0
    for epoch in (2, 3):
        [target] = set(names) - {source}
        migration = MigrateSession(session=viewer.session, worker=target)
        row = await viewer.watch(
            partial(runs_at, target), partial(gateway.call, subjects.MIGRATE_SESSION, migration)
        )
        assert row.epoch == epoch
        # Chunks of the source may still be unread.
        await viewer.watch(partial(newest_are_of, viewer, epoch))
        assert {one.worker for one in viewer.headers[-2:]} == {target}
        assert len(viewer.headers) > length
        source, length = str(target), len(viewer.headers)
    assert viewer.versions == {worker: {str(OLD if name in old else NEW)} for worker, name in names.items()}

    # Workers of both versions report one release.
    ready = await asyncio.to_thread(deployment.ready, "scheduler")
    assert "worker_releases" not in ready["warnings"]

    end = EndSession(session=viewer.session)
    ended = await viewer.until_answered(lambda: gateway.call(subjects.END_SESSION, end))
    assert ended.phase is Phase.TERMINATED
    for name, service in deployment.services.items():
        assert REFUSED not in service.logged(), name
        assert "unreadable" not in service.logged(), name
        assert "incompatible" not in service.logged(), name
