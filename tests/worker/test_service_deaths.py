"""Workers that die or are cut off, with the real scheduler: which worker may run a session, and when."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.helpers import forked_process
from tests.worker.worker_scene import TAKEOVERS, Scene, environment, pool, scene, store
from turboserve.cli.embedded import NatsServer
from turboserve.contracts.requests import DrainWorker, ListWorkers, SessionRef
from turboserve.contracts.sessions import Phase
from turboserve.subjects import (
    DRAIN_WORKER,
    LIST_DECISIONS,
    LIST_WORKERS,
    PAUSE_SESSION,
    RESUME_SESSION,
)
from turboserve.tasks import stop

__all__ = ["environment", "pool", "scene", "store"]

# The first test waits until torch, Postgres and the state store have started.
pytestmark = pytest.mark.timeout(900)

TIMES = {
    "TURBOSERVE_LEASE_S": "8",
    # Long after the end of a lease, which a busy machine may notice seconds late.
    "TURBOSERVE_WORKER_TIMEOUT_S": "20",
    "TURBOSERVE_IDLE_AFTER_S": "3600",
    # Sessions change workers here only after a death.
    "TURBOSERVE_REBALANCE": "false",
}


class Cable:
    """The connection from one process to the broker, which can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = True
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def lay(self) -> int:
        """Open the near end. Returns its port."""
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def stop_traffic(self) -> None:
        """Stop all traffic without notice: connections stay open."""
        self._whole = False

    def restore_traffic(self) -> None:
        """Restore traffic. Data sent meanwhile is lost, and so are the connections."""
        for end in self._ends:
            end.transport.abort()
        self._whole = True

    async def remove(self) -> None:
        assert self._server is not None
        self._server.close()
        await stop(*self._tasks)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if self._whole:
                    sink.write(data)
                    await sink.drain()
        sink.close()


@pytest.fixture
async def cable(nats_server: NatsServer) -> AsyncIterator[tuple[Cable, str]]:
    """A cable, and the broker's address through it for a worker."""
    url = urlsplit(nats_server.url("worker"))
    assert url.port is not None
    cable = Cable(url.port)
    port = await cable.lay()
    yield cable, url._replace(netloc=url.netloc.replace(f":{url.port}", f":{port}")).geturl()
    await cable.remove()


@pytest.fixture
async def scheduler(
    scene: Scene, environment: dict[str, str], nats_server: NatsServer, tmp_path: Path
) -> AsyncIterator[None]:
    variables = environment | TIMES | {"TURBOSERVE_NATS_URL": nats_server.url("scheduler")}
    with (tmp_path / "scheduler.log").open("wb") as log:
        process = forked_process.start(["-m", "turboserve.scheduler"], variables, log.fileno())
    yield
    process.kill()
    process.wait()
    print((tmp_path / "scheduler.log").read_text())


async def runs_on(scene: Scene, session: str, worker: str) -> None:
    async def there() -> bool:
        record = await scene.record(session)
        return (record.phase, record.worker) == (Phase.ACTIVE, worker)

    await scene.until(there, f"{session} runs on {worker}")


async def recovered_at(scene: Scene, session: str) -> float:
    """Return when the session was recovered from a silent worker, in Unix seconds."""
    page = await scene.ask(LIST_DECISIONS, SessionRef(session=session))
    [recovery] = [decision for decision in page.decisions if decision.kind == "recover"]
    return float(recovery.at)


async def kinds(scene: Scene, session: str) -> list[str]:
    page = await scene.ask(LIST_DECISIONS, SessionRef(session=session))
    return [decision.kind for decision in page.decisions if decision.worker is not None]


async def test_a_worker_that_is_cut_off_has_stopped_before_its_sessions_are_taken(
    scene: Scene, scheduler: None, cable: tuple[Cable, str]
) -> None:
    way, url = cable
    first = await scene.worker(**TIMES, TURBOSERVE_NATS_URL=url, TURBOSERVE_LOG_FORMAT="json")
    session = await scene.create()
    await runs_on(scene, session, first)
    await scene.chunks(session, 3)
    second = await scene.worker(**TIMES)
    log = scene.pool.log(first)
    beats = scene.beats[first]
    await scene.until(lambda: scene.beats[first] > beats, "it lives")
    # On a busy machine a lease may well have ended before, and been renewed.
    before = len(log.read_text())
    way.stop_traffic()

    await runs_on(scene, session, second)
    lines = [line for line in log.read_text()[before:].splitlines() if "lease expired" in line]
    stopped = [json.loads(line)["timestamp"] for line in lines]
    assert stopped, "it has not stopped"
    assert datetime.fromisoformat(stopped[-1]).timestamp() < await recovered_at(scene, session)
    came = await scene.chunks(session, 6)
    way.restore_traffic()
    # It learns that it was declared gone, and makes room for a worker with another id.
    assert await scene.exit_status(first) != 0
    chunks = await scene.chunks(session, came[-1].header.index + 4)
    assert [chunk.header.index for chunk in chunks] == list(range(len(chunks)))
    owners = [(chunk.header.epoch, chunk.header.worker) for chunk in chunks]
    assert owners == sorted(owners, key=lambda owner: owner[0])
    assert set(owners) == {(1, first), (2, second)}
    assert await kinds(scene, session) == ["place", "recover"]


async def test_a_sleeping_session_whose_holder_died_is_rebuilt_when_its_user_is_back(
    scene: Scene, scheduler: None
) -> None:
    first = await scene.worker(**TIMES)
    session = await scene.create()
    await runs_on(scene, session, first)
    await scene.chunks(session, 6)
    await scene.ask(PAUSE_SESSION, SessionRef(session=session))

    def on_host() -> bool:
        return any(one.session == session and not one.resident for one in scene.loads[first].sessions)

    await scene.until(on_host, "the state is on the host")
    second = await scene.worker(**TIMES)
    before = scene.metric(second, TAKEOVERS)
    scene.signal(first, signal.SIGKILL)

    async def noticed() -> bool:
        page = await scene.ask(LIST_WORKERS, ListWorkers())
        return first not in {record.id for record in page.workers}

    await scene.until(noticed, "its holder's death is noticed")
    suspended = await scene.record(session)
    assert (suspended.phase, suspended.epoch) == (Phase.SUSPENDED, 1)
    await scene.ask(RESUME_SESSION, SessionRef(session=session))
    await runs_on(scene, session, second)
    chunks = await scene.chunks(session, suspended.next_chunk + 4)
    assert [chunk.header.index for chunk in chunks] == list(range(len(chunks)))
    assert chunks[-1].header.worker == second
    assert scene.metric(second, TAKEOVERS) == before + 1
    assert await kinds(scene, session) == ["place", "recover"]


async def test_a_rolling_upgrade_of_the_weights_empties_the_old_worker(scene: Scene, scheduler: None) -> None:
    """No state of the old weights fits the new: running sessions are rebuilt, suspended ones when resumed."""
    old = await scene.worker(**TIMES)
    runs, sleeps = await scene.create(), await scene.create(seed=2)
    for session in (runs, sleeps):
        await runs_on(scene, session, old)
        await scene.chunks(session, 4)
    await scene.ask(PAUSE_SESSION, SessionRef(session=sleeps))
    made_with = (await scene.record(runs)).weights_digest
    new = await scene.worker(**TIMES, TINY_WORKER_SEED="6")
    await scene.ask(DRAIN_WORKER, DrainWorker(worker=old))

    async def empty() -> bool:
        page = await scene.ask(LIST_WORKERS, ListWorkers())
        row = next(record for record in page.workers if record.id == old)
        return row.sessions == row.suspended == row.incoming == 0

    await scene.until(empty, "the old worker holds nothing")
    await runs_on(scene, runs, new)
    suspended = await scene.record(sleeps)
    assert (suspended.phase, suspended.worker, suspended.weights_digest) == (Phase.SUSPENDED, None, made_with)
    await scene.ask(RESUME_SESSION, SessionRef(session=sleeps))
    await runs_on(scene, sleeps, new)
    for session, kind in ((runs, "rebuild"), (sleeps, "resume")):
        before = await scene.record(session)
        assert before.weights_digest not in (None, made_with)
        chunks = await scene.chunks(session, before.next_chunk + 4)
        assert [chunk.header.index for chunk in chunks] == list(range(len(chunks)))
        assert {chunk.header.worker for chunk in chunks} == {old, new}
        assert await kinds(scene, session) == ["place", kind]
