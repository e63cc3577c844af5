"""Workers as processes, with a real broker, state store, Redis and Postgres. The test plays the scheduler."""

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

import av
import pytest

from turboserve.bus import Bus, append, last_entry, next_entry
from turboserve.cli.embedded import NatsServer, Ports
from turboserve.config import Settings
from turboserve.contracts.chunks import HEADER, ChunkHeader, LatentsHeader, Ownership
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.requests import (
    CreateSession,
    EndSession,
    ListWorkers,
    PlaceSession,
    SessionRef,
    SubmitPrompt,
    WorkerGone,
)
from turboserve.contracts.sessions import Decision, Phase, SessionRecord
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
    OWN,
    PAUSE_SESSION,
    PLACE_SESSION,
    PLAYHEAD,
    RESUME_SESSION,
    SUBMIT_PROMPT,
    WORKER_GONE,
)

TINY_WORKER = Path(__file__).with_name("tiny_worker.py")
PATIENCE_S = 60.0
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
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
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
        with (self.logs / f"{worker}.log").open("ab") as log:
            self.processes[worker] = subprocess.Popen(
                [sys.executable, str(TINY_WORKER)], env=environment | own, stdout=log, stderr=log
            )

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
        """A worker that has joined, left over from an earlier test or new; its id."""
        worker = None if environment else self.pool.idle()
        if worker is None:
            worker = new_id("wrk")
            self.pool.start(worker, self.ports.get(worker), self.environment | environment)
        self.used.add(worker)
        if environment:
            self.spent.add(worker)

        async def joined() -> bool:
            page = await self.bus.call(LIST_WORKERS, ListWorkers())
            return worker in self.loads and any(record.id == worker for record in page.workers)

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
        with urllib.request.urlopen(url, timeout=5) as answer:
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


async def test_a_placed_session_fills_the_log_and_stops_at_its_lead(scene: Scene, tmp_path: Path) -> None:
    worker = await scene.worker()
    session = await scene.started(worker)
    chunks = await scene.chunks(session, 12)

    video = tmp_path / "video.mp4"
    inits = {chunk.data[: chunk.header.init_bytes] for chunk in chunks}
    assert len(inits) == 1
    video.write_bytes(inits.pop() + b"".join(chunk.data[chunk.header.init_bytes :] for chunk in chunks))
    with av.open(str(video)) as container:
        times = [picture.time for picture in container.decode(video=0)]
    assert times == pytest.approx([n / 16 for n in range(9 + 11 * 12)])

    await asyncio.sleep(1.0)
    last = await last_entry(scene.bus, CHUNKS, CHUNK.of(session))
    assert last is not None
    ahead = ChunkHeader.from_headers(last.headers).start_s - chunks[-1].header.start_s
    assert ahead < 3.0 + 0.75

    held = {one.session: one for one in scene.loads[worker].sessions}
    assert held[session].resident
    assert scene.loads[worker].chunk_latency_s.keys() >= {1, 2}


async def test_a_prompt_switch_is_applied_and_counted(scene: Scene) -> None:
    worker = await scene.worker()
    session = await scene.started(worker)
    await scene.chunks(session, 2)
    receipt = await scene.bus.call(
        SUBMIT_PROMPT, SubmitPrompt(session=session, event_id=new_id("evt"), prompt="a blue square")
    )
    assert receipt.control_seq == 1

    async def applied() -> bool:
        await scene.chunks(session, (await scene.record(session)).next_chunk + 2)
        return (await scene.record(session)).applied_control_seq == 1

    await scene.until(applied, "the prompt is applied")
    chunks = await scene.chunks(session, 8)
    sequence = [chunk.header.control_seq for chunk in chunks]
    assert sequence == sorted(sequence)
    assert sequence[0] == 0


async def test_pause_and_resume_continue_bit_for_bit(scene: Scene) -> None:
    worker = await scene.worker()
    straight = await scene.started(worker, seed=77)
    reference = await scene.chunks(straight, 10)
    await scene.bus.call(END_SESSION, EndSession(session=straight))

    session = await scene.started(worker, seed=77)
    await scene.chunks(session, 4)
    await scene.bus.call(PAUSE_SESSION, SessionRef(session=session))

    def on_host() -> bool:
        return any(one.session == session and not one.resident for one in scene.loads[worker].sessions)

    await scene.until(on_host, "the state is on the host")
    await scene.bus.call(RESUME_SESSION, SessionRef(session=session))
    await scene.place(session, worker, "resume")
    resumed = await scene.chunks(session, 10)

    assert resumed[-1].header.epoch == 2
    assert [chunk.data for chunk in resumed] == [chunk.data for chunk in reference]
    for index in range(10):
        assert scene.latents[session, index] == scene.latents[straight, index], f"latents of chunk {index}"


async def test_another_worker_goes_on_after_a_death(scene: Scene) -> None:
    first, second = await scene.worker(), await scene.worker()
    before = scene.metric(second, TAKEOVERS)
    session = await scene.started(first, seed=5)
    await scene.chunks(session, 6)
    scene.signal(first, signal.SIGKILL)
    await scene.declare_gone(first)
    await scene.place(session, second, "recover")
    last = await last_entry(scene.bus, CHUNKS, CHUNK.of(session))
    assert last is not None
    took_over = ChunkHeader.from_headers(last.headers).index + 1

    chunks = await scene.chunks(session, took_over + 6)
    assert chunks[0].header.worker == first
    assert chunks[-1].header.worker == second
    assert chunks[-1].header.epoch == 2
    assert scene.metric(second, TAKEOVERS) == before + 1


async def test_lost_latents_cost_the_context_but_not_the_session(scene: Scene, redis_url: str) -> None:
    import redis

    first, second = await scene.worker(), await scene.worker()
    before = scene.metric(second, LOST)
    session = await scene.started(first)
    await scene.chunks(session, 5)
    scene.signal(first, signal.SIGKILL)
    await scene.declare_gone(first)
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    await scene.place(session, second, "recover")
    chunks = await scene.chunks(session, 14)
    assert chunks[-1].header.worker == second
    assert scene.metric(second, LOST) == before + 1


async def test_a_worker_that_slept_through_a_change_of_owner_is_kept_out(scene: Scene) -> None:
    first, second = await scene.worker(), await scene.worker()
    session = await scene.started(first)
    await scene.chunks(session, 3)
    scene.signal(first, signal.SIGSTOP)
    await scene.place(session, second, "migrate")
    count = len(await scene.chunks(session, 8))
    scene.signal(first, signal.SIGCONT)

    def dropped() -> bool:
        return all(one.session != session for one in scene.loads[first].sessions)

    scene.loads.pop(first)
    await scene.until(lambda: first in scene.loads and dropped(), "the old worker lets go")
    chunks = await scene.chunks(session, count + 6)
    epochs = [(chunk.header.epoch, chunk.header.worker) for chunk in chunks]
    assert epochs == sorted(epochs, key=lambda pair: pair[0])
    assert set(epochs) == {(1, first), (2, second)}


async def test_the_broker_refuses_who_is_not_the_owner_and_the_worker_stops(scene: Scene) -> None:
    """The owner changes in the log, and the word to the old worker is late."""
    first, second = await scene.worker(), await scene.worker()
    session = await scene.started(first)
    await scene.chunks(session, 3)
    refusals = scene.metric(first, FENCED)
    usurper = Ownership(session=session, epoch=2, worker=second)
    await append(scene.bus, OWN.of(session), usurper.to_bytes(), message_id=new_id("test"))

    async def refused() -> bool:
        last = await last_entry(scene.bus, CHUNKS, CHUNK.of(session))
        assert last is not None
        await scene.play(session, ChunkHeader.from_headers(last.headers).start_s)
        return scene.metric(first, FENCED) == refusals + 1

    await scene.until(refused, "the broker refuses the chunk")
    before = await last_entry(scene.bus, CHUNKS, CHUNK.of(session))
    beats = scene.beats[first]
    # By the worker's own time: it looks for what it can publish several times between two reports.
    await scene.until(lambda: scene.beats[first] >= beats + 5, "the old worker goes on reporting")
    after = await last_entry(scene.bus, CHUNKS, CHUNK.of(session))
    assert before is not None
    assert after is not None
    assert after.sequence == before.sequence
    assert scene.metric(first, FENCED) == refusals + 1


async def test_ended_sessions_leave_no_memory(scene: Scene) -> None:
    worker = await scene.worker()
    running = await scene.started(worker)
    suspended = await scene.started(worker)
    await scene.chunks(running, 2)
    await scene.chunks(suspended, 2)
    await scene.bus.call(PAUSE_SESSION, SessionRef(session=suspended))
    await scene.until(lambda: scene.metric(worker, "turboserve_worker_host_bytes") > 0, "the host holds it")
    for session in (running, suspended):
        await scene.bus.call(END_SESSION, EndSession(session=session))

    def empty() -> bool:
        kv = scene.metric(worker, "turboserve_worker_kv_bytes")
        return kv + scene.metric(worker, "turboserve_worker_host_bytes") == 0

    await scene.until(empty, "all memory is free")


async def test_a_session_that_cannot_be_computed_fails_alone(scene: Scene) -> None:
    worker = await scene.worker()
    good = await scene.started(worker)
    bad = await scene.started(worker, prompt="raise")

    async def failed() -> bool:
        return (await scene.record(bad)).phase is Phase.FAILED

    await scene.until(failed, "the session fails")
    assert "text encoder" in str((await scene.record(bad)).reason)
    await scene.chunks(good, 6)


async def test_a_session_whose_log_cannot_be_read_fails_alone(scene: Scene) -> None:
    """Its slot was held for ever: the question for the log's end was never answered nor asked again."""
    worker = await scene.worker()
    session = await scene.create()
    await append(scene.bus, CHUNK.of(session), b"", message_id=new_id("test"), headers={HEADER: "{}"})
    await scene.place(session, worker)

    async def failed() -> bool:
        return (await scene.record(session)).phase is Phase.FAILED

    await scene.until(failed, "the session fails")
    assert "has no readable header" in str((await scene.record(session)).reason)
    for good in [await scene.started(worker) for _ in range(2)]:
        await scene.chunks(good, 3)


async def test_a_worker_that_was_declared_gone_exits_with_its_own_status(scene: Scene) -> None:
    worker = await scene.worker()
    await scene.declare_gone(worker)
    assert await scene.exit_status(worker) == 3


async def test_a_worker_that_is_asked_to_stop_publishes_what_it_has_and_leaves(scene: Scene) -> None:
    worker = await scene.worker()
    session = await scene.started(worker)
    await scene.chunks(session, 3)
    scene.signal(worker, signal.SIGTERM)
    assert await scene.exit_status(worker) == 0

    async def left() -> bool:
        page = await scene.bus.call(LIST_WORKERS, ListWorkers(include_gone=True))
        record = next(record for record in page.workers if record.id == worker)
        return (record.phase, record.reason) == (WorkerPhase.GONE, "it left")

    await scene.until(left, "it said goodbye")


async def grows(scene: Scene, session: str, seconds: float) -> bool:
    """Whether the log grows while its viewer plays on."""
    before = await last_entry(scene.bus, CHUNKS, CHUNK.of(session))
    last = before
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert last is not None
        await scene.play(session, ChunkHeader.from_headers(last.headers).start_s)
        await asyncio.sleep(0.05)
        last = await last_entry(scene.bus, CHUNKS, CHUNK.of(session))
    assert before is not None
    assert last is not None
    return last.sequence > before.sequence


async def test_a_worker_that_gets_no_answer_stops_when_its_lease_is_over(scene: Scene, store: Store) -> None:
    worker = await scene.worker(TURBOSERVE_LEASE_S="2", TURBOSERVE_REQUEST_DEADLINE_S="0.5")
    session = await scene.started(worker)
    await scene.chunks(session, 3)
    store.process.send_signal(signal.SIGSTOP)
    try:
        # The lease, a tick, and the chunks that were in work.
        await grows(scene, session, 3.0)
        assert not await grows(scene, session, 1.0)
    finally:
        store.process.send_signal(signal.SIGCONT)
    await scene.until(lambda: grows(scene, session, 0.5), "it goes on once it is answered")
    await scene.chunks(session, 12)


async def test_a_worker_goes_on_while_there_is_no_state_store(scene: Scene, store: Store) -> None:
    worker = await scene.worker(TURBOSERVE_LEASE_S="2", TURBOSERVE_REQUEST_DEADLINE_S="0.5")
    session = await scene.started(worker)
    await scene.chunks(session, 3)
    store.kill()
    try:
        await grows(scene, session, 3.0)
        last = await last_entry(scene.bus, CHUNKS, CHUNK.of(session))
        assert last is not None
        # More than a lease that is over could have left in work.
        await scene.chunks(session, ChunkHeader.from_headers(last.headers).index + 9)
    finally:
        store.start()

    async def counted() -> bool:
        return (await scene.record(session)).next_chunk > 6

    await scene.until(counted, "the new state store has counted the chunks")
