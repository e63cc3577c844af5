"""How chunks are counted: in how many transactions, and what an instance that stops says of its lag."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from tests.helpers.broker_scene import Scene
from tests.helpers.chunk_headers import chunk_header
from turboserve.bus import Bus, append
from turboserve.bus.owners import Owners
from turboserve.contracts.chunks import Ownership
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.service import HostClock
from turboserve.state_store.accounting import CURSOR, Accounting
from turboserve.state_store.periodic_writes import WorkerChunks
from turboserve.subjects import CHUNK, CHUNKS, OWN

CHUNKS_SENT = 200


def unexpected() -> None:
    raise AssertionError("a chunk is from another worker than its session's owner")


async def counter(scene: Scene, bus: Bus, database: MemoryDatabase) -> Accounting:
    clock = HostClock(scene.loop)
    playheads = SimpleNamespace(known=lambda session: None)
    history = WorkerChunks(database, clock, enabled=True)
    owners = Owners(bus, unexpected)
    return Accounting(database, bus, owners, playheads, clock, 0.05, lambda: None, history)  # type: ignore[arg-type]


async def append_chunk(bus: Bus, index: int) -> None:
    header = chunk_header("ses_1", index, 1, "wrk_1", control_seq=1)
    subject = CHUNK.by("ses_1", header.worker)
    await append(bus, subject, b"video", message_id=f"m{index}", headers=header.to_headers())


async def append_owner(bus: Bus) -> None:
    own = Ownership(session="ses_1", epoch=1, worker="wrk_1")
    await append(bus, OWN.of("ses_1"), own.to_bytes(), message_id="own")


def test_chunks_that_come_together_are_counted_together() -> None:
    scene = Scene(latency_s=0.001)
    postgres = MemoryPostgres(loop=scene.loop)
    bus = scene.connect("state-store")
    scene.make_stream()

    async def count() -> None:
        await (await counter(scene, bus, MemoryDatabase(postgres))).run()

    async def send() -> None:
        await append_owner(bus)
        for index in range(CHUNKS_SENT):
            await append_chunk(bus, index)
            await asyncio.sleep(0.003)

    counting = scene.spawn("state-store", count())
    scene.run("state-store", send())
    seconds = scene.loop.time()
    scene.loop.advance(1.0)
    assert postgres.tables.cursors.rows[CURSOR] == scene.broker.jetstream.streams[CHUNKS].last_sequence
    assert postgres.transactions <= 20 * seconds + 3
    counting.cancel()
    scene.close()


def test_an_instance_that_no_longer_counts_is_not_behind() -> None:
    """Incident: a state store that lost its lead during slow transactions warned of a lag for good."""
    scene = Scene(latency_s=0.001)
    bus = scene.connect("state-store")
    scene.make_stream()
    made: list[tuple[MemoryDatabase, Accounting]] = []

    async def make() -> None:
        database = MemoryDatabase(MemoryPostgres(loop=scene.loop))
        made.append((database, await counter(scene, bus, database)))

    scene.run("state-store", make())
    ((database, counting),) = made
    counts = scene.spawn("state-store", counting.run())
    scene.run("state-store", append_owner(bus))
    scene.loop.advance(1.0)
    database.cut_off(1_000.0)
    scene.run("state-store", append_chunk(bus, 0))
    scene.loop.advance(30.0)
    warning = counting.warning()
    assert warning is not None
    assert warning.startswith("behind for")
    counts.cancel()
    scene.loop.advance(1.0)
    assert counting.warning() is None
    scene.close()
