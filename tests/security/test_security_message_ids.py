"""Message ids belong to a stream, not to a subject: an id used elsewhere drops no real message.

The broker treats a message with a known id as a repetition and stores nothing. A worker's credentials let it
append to any chunk log, under any id, also under the ids of messages that others will append.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry.trace import INVALID_SPAN

from tests.helpers.service_process import Service, connected, state_store
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.bus import Bus, append, next_entry
from turboserve.cli.embedded import NatsServer
from turboserve.clock import SystemClock
from turboserve.contracts.canaries import Canary
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.requests import CreateSession, ListWorkers, PlaceSession, Renew, SessionRef
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.workers import LoadReport
from turboserve.ids import new_id
from turboserve.subjects import CANARY_CHUNKS, CHUNK, CHUNKS
from turboserve.worker.engine.interface import ChunkTimings
from turboserve.worker.media import EncodedChunk
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.events import PublishOutcome
from turboserve.worker.service.packager import PackagedChunk
from turboserve.worker.service.wire import Wire

CONFIG = ModelConfig(48, 96, 2, 1, 12, 5, 4, 4)
PATIENCE_S = 60.0
CANARY_S = 0.2
CANARIES_TAKEN = 500
"""Ids of this many canaries are used before the canaries come: more than the test waits for."""


@pytest.fixture(scope="module")
def store(
    nats_server: NatsServer,
    nats_url: str,
    postgres_url: str,
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("logs") / "state-store.log"
    service = state_store(
        nats_server, log, postgres_url, redis_url, TURBOSERVE_CANARY_INTERVAL_S=str(CANARY_S)
    )
    service.start()
    yield service
    service.end()


@pytest.fixture
async def worker_bus(nats_server: NatsServer, store: Service) -> AsyncIterator[Bus]:
    bus = await connected(nats_server, "worker", PATIENCE_S)
    yield bus
    await bus.close()


@pytest.fixture
async def attacker(nats_server: NatsServer, store: Service) -> AsyncIterator[Bus]:
    """Another worker's connection."""
    bus = await connected(nats_server, "worker", PATIENCE_S)
    yield bus
    await bus.close()


async def take(attacker: Bus, message_id: str) -> bool:
    """Append under `message_id` to a log of no session. Returns whether the id was free."""
    ack = await append(
        attacker, CHUNK.by("ses_other", "w1"), b"no video", message_id=message_id, deadline_s=PATIENCE_S
    )
    return not ack.duplicate


async def placed(nats_server: NatsServer, worker_bus: Bus, worker: str) -> SessionRecord:
    """Create a session that `worker` owns, with its fence in the log."""
    gateway = await connected(nats_server, "gateway", PATIENCE_S)
    scheduler = await connected(nats_server, "scheduler", PATIENCE_S)
    try:

        async def answers() -> bool:
            try:
                await gateway.call(subjects.LIST_WORKERS, ListWorkers())
            except TurboServeError:
                return False
            return True

        await eventually(answers)
        load = LoadReport(worker=worker, model="toyworld", capacity=4)
        await worker_bus.call(subjects.RENEW, Renew(load=load))
        create = CreateSession(id=new_id("ses"), tenant="alice", model="toyworld", prompt="a circle", seed=1)
        record = await gateway.call(subjects.CREATE_SESSION, create)
        decision = Decision(session=record.id, epoch=0, kind="place", reason="test")
        place = PlaceSession(
            session=record.id, expected_version=record.version, worker=worker, decision=decision
        )
        await scheduler.call(subjects.PLACE_SESSION, place)
        found: list[SessionRecord] = []

        async def fenced() -> bool:
            found.append(await gateway.call(subjects.GET_SESSION, SessionRef(session=record.id)))
            return found[-1].own_revision is not None

        await eventually(fenced)
        return found[-1]
    finally:
        await gateway.close()
        await scheduler.close()


def chunk(session: str, index: int) -> PackagedChunk:
    return PackagedChunk(
        session=session,
        run=1,
        index=index,
        control_seq=0,
        first_frame=12 * index,
        fps=16,
        packaged=EncodedChunk(b"init", b"fragment %d" % index, "avc1.42c01e", 64, 64, 12),
        latents=b"",
        latents_dtype="float32",
        latents_shape=(),
        compute_s=0.1,
        timings=ChunkTimings(0.0, 0.0, 0.0, 0.0),
        packaged_at_s=0.0,
        concurrent_sessions=1,
        span=INVALID_SPAN,
    )


async def logged(bus: Bus, session: str) -> list[tuple[int, bytes]]:
    """Return index and payload of every chunk in the session's log."""
    found: list[tuple[int, bytes]] = []
    sequence = 0
    while entry := await next_entry(bus, CHUNKS, CHUNK.of(session), sequence + 1):
        found.append((ChunkHeader.of_entry(session, entry.headers).index, entry.data))
        sequence = entry.sequence
    return found


async def test_a_chunk_whose_message_id_was_used_on_another_subject_is_stored_once(
    nats_server: NatsServer, worker_bus: Bus, attacker: Bus
) -> None:
    worker = new_id("wrk")
    record = await placed(nats_server, worker_bus, worker)
    assert record.own_revision is not None
    ownership = (record.epoch, record.own_revision)
    for index in range(3):
        assert await take(attacker, f"{record.id}:{index}")
    wire = Wire(worker_bus, SystemClock(), worker, CONFIG, chunk_ttl_s=600)
    expected = []
    for index in range(4):
        expected.append((index, b"initfragment %d" % index))
        # Once, and once more as if the acknowledgement had been lost.
        for _ in range(2):
            outcome, _, _ = await wire.publish(chunk(record.id, index), ownership, 0)
            assert outcome is PublishOutcome.ACKED
            assert await logged(worker_bus, record.id) == expected


async def test_canaries_whose_message_ids_are_used_in_advance_still_come(
    worker_bus: Bus, attacker: Bus
) -> None:
    """Without canaries no service is ready, and the broker counts as unable to store."""
    heard: asyncio.Queue[tuple[Canary, str]] = asyncio.Queue()
    live = await worker_bus.client.subscribe(CANARY_CHUNKS.live(""))

    async def listen() -> None:
        async for raw in live.messages:
            message_id = (raw.headers or {})["Nats-Msg-Id"]
            heard.put_nowait((Canary.from_bytes(raw.data), message_id))

    task = asyncio.create_task(listen())
    try:
        newest = -1
        async with asyncio.timeout(4 * PATIENCE_S):
            while True:
                canary, message_id = await heard.get()
                if canary.number <= newest:
                    continue
                # Guesses from public canaries: the instance with later numbers, and this id incremented.
                prefixes = (f"{canary.instance}:", message_id.removesuffix(str(canary.number)))
                guesses = {
                    f"{prefix}{canary.number + more}"
                    for prefix in prefixes
                    for more in range(1, CANARIES_TAKEN)
                }
                await asyncio.gather(*(take(attacker, guess) for guess in sorted(guesses)))
                while not heard.empty():
                    newest = heard.get_nowait()[0].number
                numbers = [(await heard.get())[0].number for _ in range(5)]
                assert numbers == list(range(numbers[0], numbers[0] + 5))
                newest = numbers[-1]
                # A busy machine may be so slow with the guesses that canaries outrun them.
                if newest < canary.number + CANARIES_TAKEN:
                    break
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
