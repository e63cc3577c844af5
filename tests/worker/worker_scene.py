"""Workers as processes, with a real broker, state store, Redis and Postgres. Its user plays the scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_worker import ForkedWorker

from turboserve.bus import Bus, next_entry
from turboserve.cli.embedded import NatsServer, Ports
from turboserve.config import Settings
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

PATIENCE_S = 150.0
TAKEOVERS = "turboserve_worker_takeovers_total"
LOST = 'turboserve_worker_takeovers_total{context="lost"'
FENCED = "turboserve_worker_fenced_total"


class Chunk:
    """An accepted chunk."""

    def __init__(self, header: ChunkHeader, data: bytes, sequence: int) -> None:
        self.header, self.data, self.sequence = header, data, sequence


class Pool:
    """Worker processes, kept from test to test: starting one takes longer than most tests."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.processes: dict[str, ForkedWorker] = {}
        self.health: dict[str, int] = {}
        self.free: set[str] = set()

    def idle(self) -> str | None:
        return self.free.pop() if self.free else None

    def start(self, worker: str, health_port: int, environment: dict[str, str]) -> None:
        self.health[worker] = health_port
        own = {
            "TURBOSERVE_WORKER_ID": worker,
            "TURBOSERVE_WORKER_MAX_SESSIONS": "2",
            "TURBOSERVE_HEALTH_PORT": str(health_port),
        }
        self.processes[worker] = ForkedWorker(environment | own, self.logs / f"{worker}.log")

    def kill(self, worker: str) -> None:
        process = self.processes[worker]
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


class Scene:
    """A bus, and processes around it."""

    def __init__(self, bus: Bus, environment: dict[str, str], ports: Ports, pool: Pool) -> None:
        self.bus, self.environment, self.ports, self.pool = bus, environment, ports, pool
        self.latents: dict[tuple[str, int], bytes] = {}
        self.loads: dict[str, LoadReport] = {}
        self.beats: Counter[str] = Counter()
        """How many reports each worker has sent."""
        self.sessions: list[str] = []
        self.used: set[str] = set()
        """Workers of this test."""
        self.spent: set[str] = set()
        """Those that no other test should get."""

    async def listen(self) -> None:
        async def latents(header: LatentsHeader, data: bytes) -> None:
            self.latents[header.session, header.index] = data

        async def load(report: LoadReport, _: bytes) -> None:
            self.loads[report.worker] = report
            self.beats[report.worker] += 1

        await self.bus.subscribe(LATENTS, "*", latents)
        await self.bus.subscribe(LOAD, "*", load)

    async def worker(self, **environment: str) -> str:
        """A worker that has loaded and joined, left over from an earlier test or new; its id."""
        worker = None if environment else self.pool.idle()
        if worker is None:
            worker = new_id("wrk")
            self.pool.start(worker, self.ports.get(worker), self.environment | environment)
        self.used.add(worker)
        if environment:
            self.spent.add(worker)

        async def joined() -> bool:
            page = await self.bus.call(LIST_WORKERS, ListWorkers())
            phases = {record.id: record.phase for record in page.workers}
            said = self.loads.get(worker)
            loaded = said is not None and said.phase is not WorkerPhase.STARTING
            return loaded and phases.get(worker, WorkerPhase.STARTING) is not WorkerPhase.STARTING

        await self.until(joined, f"{worker} joins")
        return worker

    def signal(self, worker: str, number: signal.Signals) -> None:
        self.spent.add(worker)
        self.pool.processes[worker].send_signal(number)

    async def declare_gone(self, worker: str) -> None:
        self.spent.add(worker)
        await self.bus.call(WORKER_GONE, WorkerGone(worker=worker, reason="the test says so"))

    async def exit_status(self, worker: str) -> int | None:
        process = self.pool.processes[worker]
        await self.until(lambda: process.poll() is not None, f"{worker} exits")
        return process.returncode

    def metric(self, worker: str, name: str) -> float:
        url = f"http://127.0.0.1:{self.pool.health[worker]}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def clear(self) -> None:
        """Leave no session behind, and only such workers as are as good as new."""
        for session in self.sessions:
            await self.bus.call(END_SESSION, EndSession(session=session))
        for worker in self.used & self.spent:
            self.pool.kill(worker)
            await self.bus.call(WORKER_GONE, WorkerGone(worker=worker, reason="the test is over"))
        self.pool.free |= self.used - self.spent

    # The store

    async def create(self, prompt: str = "a red circle", seed: int = 1) -> str:
        session = new_id("ses")
        request = CreateSession(id=session, tenant="t", model="toyworld", prompt=prompt, seed=seed)
        await self.bus.call(CREATE_SESSION, request)
        self.sessions.append(session)
        return session

    async def record(self, session: str) -> SessionRecord:
        return await self.bus.call(GET_SESSION, SessionRef(session=session))

    async def place(self, session: str, worker: str, kind: str = "place") -> SessionRecord:
        record = await self.record(session)
        decision = Decision(session=session, epoch=record.epoch + 1, worker=worker, kind=kind, reason="test")
        request = PlaceSession(
            session=session, expected_version=record.version, worker=worker, decision=decision
        )
        return await self.bus.call(PLACE_SESSION, request)

    async def started(self, worker: str, prompt: str = "a red circle", seed: int = 1) -> str:
        session = await self.create(prompt, seed)
        await self.place(session, worker)
        return session

    async def play(self, session: str, playhead_s: float) -> None:
        await self.bus.publish(PLAYHEAD, session, Playhead(session=session, playhead_s=playhead_s, viewers=0))

    # The log

    async def chunks(self, session: str, count: int) -> list[Chunk]:
        """The first `count` chunks, waiting and playing on as needed. Checks that they are contiguous."""
        found: list[Chunk] = []
        sequence = 1
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            entry = await next_entry(self.bus, CHUNKS, CHUNK.of(session), sequence)
            if entry is None:
                assert time.monotonic() < deadline, f"{len(found)} of {count} chunks of {session}"
                await self.play(session, found[-1].header.start_s if found else 0.0)
                await asyncio.sleep(0.05)
                continue
            found.append(Chunk(ChunkHeader.from_headers(entry.headers), entry.data, entry.sequence))
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

    async def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                result = condition()
                if await result if asyncio.iscoroutine(result) else result:
                    return
            except UnavailableError:
                pass
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def environment(nats_server: NatsServer, nats_url: str, redis_url: str, postgres_url: str) -> dict[str, str]:
    return os.environ | {
        "TURBOSERVE_NATS_URL": nats_server.url("worker"),
        "TURBOSERVE_REDIS_URL": redis_url,
        "TURBOSERVE_POSTGRES_URL": postgres_url,
        "TURBOSERVE_HEARTBEAT_S": "0.3",
        "OMP_NUM_THREADS": "1",
    }


class Store:
    """The state store's process."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment, self._log = environment, log
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        log = self._log.open("ab")
        command = [sys.executable, "-m", "turboserve.state_store"]
        self.process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        return self.process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


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
    bus = await Bus.connect("tester", Settings(nats_url=nats_url))
    scene = Scene(bus, environment, ports, pool)
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
