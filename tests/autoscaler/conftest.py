"""The real state store and autoscaler as processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.helpers.service_process import Service, connected, state_store
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.pool import PoolStatus
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.workers import WorkerRecord
from turboserve.ids import new_id

WORKER = Path(__file__).with_name("renewing_worker.py")


class Autoscaler(Service):
    """An autoscaler whose workers behave as `mode` says, and a view of its status."""

    starts = True

    def __init__(self, nats: NatsServer, directory: Path, bus: Bus) -> None:
        self._mode = directory / "mode"
        self.mode = "ready"
        self.bus = bus
        self.status: PoolStatus | None = None
        super().__init__(
            "autoscaler",
            "turboserve.autoscaler",
            nats,
            directory / "log",
            RENEWING_MODE=str(self._mode),
            TURBOSERVE_POOL_WORKER_VARIABLES="RENEWING_*",
            TURBOSERVE_POOL_WORKER_COMMAND=json.dumps([sys.executable, str(WORKER)]),
            # Each test has a pool of its own, so that no test sees another's rows as orphans.
            TURBOSERVE_POOL_NAME=new_id("p").replace("_", "")[:20],
            TURBOSERVE_WORKER_NATS_PASSWORD=nats.passwords["worker"],
        )

    @property
    def name(self) -> str:
        """Id of its pool."""
        return self.variables["TURBOSERVE_POOL_NAME"]

    @property
    def mode(self) -> str:
        return self._mode.read_text()

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode.write_text(mode)

    def workers(self) -> list[int]:
        """Return the process ids of all living workers that it has started, known to the store or not."""
        pool = f"TURBOSERVE_POOL_MEMBER={self.name}-".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and pool in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    async def rows(self) -> dict[str, WorkerRecord]:
        """Return the pool's workers that are not gone, by pool member."""
        pool = self.name
        found: list[WorkerRecord] = []

        async def told() -> bool:
            # A store on a busy machine may need longer than a request's deadline.
            with suppress(TurboServeError):
                found[:] = (await self.bus.call(subjects.LIST_WORKERS, ListWorkers())).workers
                return True
            return False

        await eventually(told)
        return {
            row.pool_member: row
            for row in found
            if row.pool_member and row.pool_member.startswith(f"{pool}-")
        }

    async def replaced(self, member: str, worker: str) -> None:
        """Wait until the pool member has no worker or another one."""

        async def is_so() -> bool:
            row = (await self.rows()).get(member)
            return row is None or row.id != worker

        await eventually(is_so)

    async def reason(self, worker: str) -> str | None:
        """Wait until the worker is gone. Returns the reason."""
        found: list[WorkerRecord] = []

        async def is_gone() -> bool:
            with suppress(TurboServeError):
                page = await self.bus.call(subjects.LIST_WORKERS, ListWorkers(include_gone=True))
                found[:] = [row for row in page.workers if row.id == worker and row.phase == "gone"]
            return bool(found)

        await eventually(is_gone)
        return found[0].reason

    async def ready(self, count: int) -> dict[str, WorkerRecord]:
        """Wait until exactly `count` workers are ready. Returns the rows by pool member."""
        found: dict[str, WorkerRecord] = {}

        async def there() -> bool:
            found.clear()
            found.update(await self.rows())
            return len(found) == count and all(row.phase == "ready" for row in found.values())

        await eventually(there)
        return dict(found)

    async def says(self, condition: Callable[[PoolStatus], bool]) -> PoolStatus:
        """Wait for a status that fulfills the condition."""

        async def said() -> bool:
            return self.status is not None and condition(self.status)

        try:
            await eventually(said)
        except AssertionError:
            raise AssertionError(f"it never said so; last: {self.status!r}") from None
        assert self.status is not None
        return self.status


@pytest.fixture(scope="module")
def store(
    nats_server: NatsServer,
    nats_url: str,
    redis_url: str,
    postgres_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    """The state store on empty servers."""
    log = tmp_path_factory.mktemp("store") / "log"
    patient = {"TURBOSERVE_TRANSACTION_DEADLINE_S": "60", "TURBOSERVE_REQUEST_DEADLINE_S": "90"}
    service = state_store(nats_server, log, postgres_url, redis_url, **patient)
    service.start()
    yield service
    service.end()


@pytest.fixture
async def autoscaler(nats_server: NatsServer, store: Service, tmp_path: Path) -> AsyncIterator[Autoscaler]:
    """An autoscaler that is not started yet. At the end, all its processes are killed."""
    async with _made(nats_server, tmp_path) as service:
        yield service


@pytest.fixture
async def two_autoscalers(
    nats_server: NatsServer, store: Service, tmp_path: Path
) -> AsyncIterator[tuple[Autoscaler, Autoscaler]]:
    """Two autoscalers with a pool each, not started yet. At the end, all their processes are killed."""
    async with AsyncExitStack() as stack:
        made = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            made.append(await stack.enter_async_context(_made(nats_server, tmp_path / name)))
        yield made[0], made[1]


@asynccontextmanager
async def _made(nats_server: NatsServer, directory: Path) -> AsyncIterator[Autoscaler]:
    bus = await connected(nats_server, "gateway")

    async def serves() -> bool:
        with suppress(TurboServeError):
            await bus.call(subjects.LIST_WORKERS, ListWorkers())
            return True
        return False

    await eventually(serves)
    service = Autoscaler(nats_server, directory, bus)

    async def hear(status: PoolStatus, _body: bytes) -> None:
        if any(s.member.startswith(service.name) for s in status.members):
            service.status = status

    await bus.subscribe(subjects.POOL, service.name, hear)
    try:
        yield service
    finally:
        await asyncio.to_thread(service.end)
        for pid in service.workers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await bus.close()
        print(service.logged())
