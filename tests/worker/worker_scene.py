"""Workers as processes, with a real broker, state store, Redis and Postgres. The test plays the scheduler."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import pytest

from tests.helpers.waiting import eventually
from tests.worker.worker_processes import Pool, Store
from turboserve.bus import Bus, append, last_entry, next_entry
from turboserve.bus.log import Entry
from turboserve.cli.embedded import NatsServer, Ports
from turboserve.config import Settings
from turboserve.contracts.base import Contract
from turboserve.contracts.chunks import ChunkHeader, LatentsHeader
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.requests import (
    CreateSession,
    EndSession,
    ListWorkers,
    PlaceSession,
    SessionRef,
    WorkerGone,
)
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.workers import LoadReport, Playhead, WorkerPhase
from turboserve.ids import new_id
from turboserve.subject_types import Endpoint
from turboserve.subjects import (
    CHUNK,
    CHUNKS,
    CREATE_SESSION,
    END_SESSION,
    GET_SESSION,
    LATENTS,
    LIST_WORKERS,
    LOAD,
    PLACE_SESSION,
    PLAYHEAD,
    WORKER_GONE,
)

PATIENCE_S = 240.0
ANSWER_S = 20.0
"""Time after which a request without an answer is repeated."""
LOG_LINES = 30
TAKEOVERS = "turboserve_worker_takeovers_total"
LOST = 'turboserve_takeover_context="lost"'
FENCED = "turboserve_worker_fenced_total"
T = TypeVar("T")
Req = TypeVar("Req", bound=Contract)
Resp = TypeVar("Resp", bound=Contract)


class Chunk:
    """An accepted chunk."""

    def __init__(self, header: ChunkHeader, data: bytes, sequence: int) -> None:
        self.header, self.data, self.sequence = header, data, sequence

    @classmethod
    def of(cls, entry: Entry) -> Chunk:
        return cls(ChunkHeader.from_headers(entry.headers), entry.data, entry.sequence)


class Scene:
    """A bus, and processes around it."""

    def __init__(self, bus: Bus, environment: dict[str, str], ports: Ports, pool: Pool, store: Store) -> None:
        self.bus, self.environment, self.ports = bus, environment, ports
        self.pool, self._store = pool, store
        self.latents: dict[tuple[str, int], bytes] = {}
        self.loads: dict[str, LoadReport] = {}
        self.beats: Counter[str] = Counter()
        """Number of reports of each worker."""
        self.sessions: list[str] = []
        self.used: set[str] = set()
        """Workers of this test."""
        self.spent: set[str] = set()
        """Workers that no other test should get."""

    async def listen(self) -> None:
        async def latents(header: LatentsHeader, data: bytes) -> None:
            self.latents[header.session, header.index] = data

        async def load(report: LoadReport, _: bytes) -> None:
            self.loads[report.worker] = report
            self.beats[report.worker] += 1

        await self.bus.subscribe(LATENTS, "*", latents)
        await self.bus.subscribe(LOAD, "*", load)

    async def worker(self, *command: str, **environment: str) -> str:
        """Return the id of a worker that has loaded and joined: an idle one of an earlier test, or a new one.

        `command`: what follows `python`, if it is not the tiny worker. The worker has just renewed: a silent
        one would count as no room for sessions.
        """
        since = time.time()
        worker = None if environment else self.pool.idle()
        if worker is None:
            worker = new_id("wrk")
            started = self.environment | environment
            self.pool.start(worker, self.ports.get(worker), started, *([command] if command else ()))
        self.used.add(worker)
        if environment:
            self.spent.add(worker)

        async def joined() -> bool:
            page = await self.bus.call(LIST_WORKERS, ListWorkers())
            row = next((record for record in page.workers if record.id == worker), None)
            said = self.loads.get(worker)
            if row is None or said is None or row.renewed_at < since:
                return False
            return WorkerPhase.STARTING not in (row.phase, said.phase)

        await self.until(joined, f"{worker} joins")
        return worker

    def signal(self, worker: str, number: signal.Signals) -> None:
        self.spent.add(worker)
        self.pool.processes[worker].send_signal(number)

    async def declare_gone(self, worker: str) -> None:
        self.spent.add(worker)
        await self.ask(WORKER_GONE, WorkerGone(worker=worker, reason="the test says so"))

    async def exit_status(self, worker: str) -> int | None:
        process = self.pool.processes[worker]
        await self.until(lambda: process.poll() is not None, f"{worker} exits")
        return process.returncode

    def metric(self, worker: str, name: str, label: str = "") -> float:
        """Return the sum of a worker's samples whose names begin with `name` and which have `label`."""
        url = f"http://127.0.0.1:{self.pool.health[worker]}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and label in line)

    async def clear(self) -> None:
        """Leave no session behind, and only workers that are as good as new."""
        for session in self.sessions:
            await self.ask(END_SESSION, EndSession(session=session))
        for worker in self.used & self.spent:
            self.pool.kill(worker)
            await self.ask(WORKER_GONE, WorkerGone(worker=worker, reason="the test is over"))
        self.pool.free |= self.used - self.spent

    # The store

    async def ask(self, endpoint: Endpoint[Req, Resp], request: Req) -> Resp:
        """Return the answer.

        Repeats the request while the state store is slow, down or without its servers.
        """
        return await self._answer(partial(self.bus.call, endpoint, request), endpoint.subject)

    async def create(self, prompt: str = "a red circle", seed: int = 1) -> str:
        session = new_id("ses")
        request = CreateSession(id=session, tenant="t", model="toyworld", prompt=prompt, seed=seed)
        await self.ask(CREATE_SESSION, request)
        self.sessions.append(session)
        return session

    async def record(self, session: str) -> SessionRecord:
        return await self.ask(GET_SESSION, SessionRef(session=session))

    async def place(self, session: str, worker: str, kind: str = "place") -> SessionRecord:
        record = await self.record(session)
        decision = Decision(session=session, epoch=record.epoch + 1, worker=worker, kind=kind, reason="test")
        request = PlaceSession(
            session=session, expected_version=record.version, worker=worker, decision=decision
        )
        return await self.ask(PLACE_SESSION, request)

    async def started(self, worker: str, prompt: str = "a red circle", seed: int = 1) -> str:
        session = await self.create(prompt, seed)
        await self.place(session, worker)
        return session

    async def play(self, session: str, playhead_s: float) -> None:
        await self.bus.publish(PLAYHEAD, session, Playhead(session=session, playhead_s=playhead_s, viewers=0))

    # The log

    async def append(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Append without the fence, with retries."""
        message_id = new_id("test")
        attempt = partial(append, self.bus, subject, data, message_id=message_id, headers=headers)
        await self._answer(attempt, f"append to {subject}")

    async def newest(self, session: str) -> Chunk:
        """Return the last chunk of a session that has some."""
        subject = CHUNK.of(session)
        entry = await self._answer(partial(last_entry, self.bus, CHUNKS, subject), f"end of {subject}")
        assert entry is not None, f"{session} has no chunk"
        return Chunk.of(entry)

    async def chunks(self, session: str, count: int) -> list[Chunk]:
        """Return the first `count` chunks, waiting and playing on as needed.

        Checks that they are contiguous.
        """
        found: list[Chunk] = []
        sequence = 1
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            try:
                entry = await next_entry(self.bus, CHUNKS, CHUNK.of(session), sequence)
            except UnavailableError:
                entry = None
            if entry is None:
                if time.monotonic() >= deadline:
                    raise AssertionError(self.diagnosis(f"{len(found)} of {count} chunks of {session}"))
                await self.play(session, found[-1].header.start_s if found else 0.0)
                await asyncio.sleep(0.05)
                continue
            found.append(Chunk.of(entry))
            sequence = entry.sequence + 1
        frame = 0
        for index, chunk in enumerate(found):
            assert chunk.header.index == index
            assert chunk.header.first_frame == frame
            assert chunk.header.frames == (9 if index == 0 else 12)
            frame += chunk.header.frames
        epochs = [chunk.header.epoch for chunk in found]
        assert epochs == sorted(epochs)
        return found

    # Waiting

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition, which may be a coroutine function and may raise `UnavailableError`."""
        last_error: UnavailableError | None = None

        async def holds() -> object:
            nonlocal last_error
            try:
                result = condition()
                return await result if inspect.isawaitable(result) else result
            except UnavailableError as error:
                last_error = error
            return False

        def failed() -> str:
            return self.diagnosis(what if last_error is None else f"{what}; last error: {last_error!r}")

        await eventually(holds, PATIENCE_S, failed)

    async def more_reports(self, worker: str, count: int) -> None:
        """Wait for `count` reports that the worker sends from now on."""
        end = self.beats[worker] + 1 + count
        await self.until(lambda: self.beats[worker] >= end, f"{count} more reports of {worker}")

    def diagnosis(self, what: str) -> str:
        """Return the awaited condition, the last reports of the test's workers, and the ends of all logs."""
        found = [f"not in {PATIENCE_S:g} s: {what}"]
        found += [str(self.loads.get(worker, f"no report of {worker}")) for worker in sorted(self.used)]
        for log in (*map(self.pool.log, sorted(self.used)), self._store.log):
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            found += [f"--- {log.name}", *lines[-LOG_LINES:]]
        return "\n".join(found)

    async def _answer(self, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await attempt()
            except UnavailableError as error:
                if time.monotonic() >= deadline:
                    raise AssertionError(self.diagnosis(what)) from error
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def environment(nats_server: NatsServer, nats_url: str, redis_url: str, postgres_url: str) -> dict[str, str]:
    return os.environ | {
        "TURBOSERVE_NATS_URL": nats_server.url("worker"),
        "TURBOSERVE_REDIS_URL": redis_url,
        "TURBOSERVE_POSTGRES_URL": postgres_url,
        "TURBOSERVE_HEARTBEAT_S": "0.3",
        # A busy machine breaks attempts at a copy, and makes each of them slow.
        "TURBOSERVE_MIGRATION_TIMEOUT_S": "90",
        "TURBOSERVE_MIGRATION_QUIESCE_MAX_S": "90",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def store(
    environment: dict[str, str], nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    store = Store(
        environment | {"TURBOSERVE_NATS_URL": nats_server.url("state-store")},
        tmp_path_factory.mktemp("store") / "store.log",
    )
    try:
        yield store
    finally:
        store.kill()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("workers"))
    try:
        yield pool
    finally:
        for worker in pool.processes:
            pool.kill(worker)


@pytest.fixture
async def scene(
    store: Store, pool: Pool, environment: dict[str, str], nats_url: str, ports: Ports
) -> AsyncIterator[Scene]:
    bus = await Bus.connect("tester", Settings(nats_url=nats_url, request_deadline_s=ANSWER_S))
    scene = Scene(bus, environment, ports, pool, store)
    await scene.listen()

    async def answers() -> bool:
        await bus.call(LIST_WORKERS, ListWorkers())
        return True

    await scene.until(answers, "the state store answers")
    try:
        yield scene
    finally:
        await scene.clear()
        await bus.close()
