"""The number of transactions that the counting of chunks takes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from tests.helpers.broker_scene import Scene
from tests.helpers.chunk_headers import chunk_header
from turboserve.bus import append
from turboserve.bus.owners import Owners
from turboserve.contracts.chunks import Ownership
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.service import HostClock
from turboserve.state_store.accounting import CURSOR, Accounting
from turboserve.state_store.periodic_writes import WorkerChunks
from turboserve.subjects import CHUNK, CHUNKS, OWN

CHUNKS_SENT = 200


def test_chunks_that_come_together_are_counted_together() -> None:
    scene = Scene(latency_s=0.001)
    postgres = MemoryPostgres(loop=scene.loop)
    bus = scene.connect("state-store")
    scene.make_stream()
    foreign: list[int] = []

    async def count() -> None:
        playheads = SimpleNamespace(known=lambda session: None)
        clock = HostClock(scene.loop)
        owners = Owners(bus, lambda: foreign.append(1))
        database = MemoryDatabase(postgres)
        history = WorkerChunks(database, clock, enabled=True)
        counting = Accounting(database, bus, owners, playheads, clock, 0.05, lambda: None, history)  # type: ignore[arg-type]
        await counting.run()

    async def send() -> None:
        own = Ownership(session="ses_1", epoch=1, worker="wrk_1")
        await append(bus, OWN.of("ses_1"), own.to_bytes(), message_id="own")
        for index in range(CHUNKS_SENT):
            header = chunk_header("ses_1", index, 1, "wrk_1", control_seq=1)
            await append(
                bus,
                CHUNK.by("ses_1", header.worker),
                b"video",
                message_id=f"m{index}",
                headers=header.to_headers(),
            )
            await asyncio.sleep(0.003)

    counting = scene.spawn("state-store", count())
    scene.run("state-store", send())
    seconds = scene.loop.time()
    scene.loop.advance(1.0)
    assert postgres.tables.cursors.rows[CURSOR] == scene.broker.jetstream.streams[CHUNKS].last_sequence
    assert not foreign
    assert postgres.transactions <= 20 * seconds + 3
    counting.cancel()
    scene.close()
