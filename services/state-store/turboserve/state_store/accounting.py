"""Counting chunks from the log: how far each session is, and which prompts have been applied."""

from __future__ import annotations

from collections.abc import Callable

from turboserve.bus import Bus, Entry, consume
from turboserve.clock import Clock
from turboserve.contracts.chunks import HEADER, ChunkHeader
from turboserve.contracts.events import Event
from turboserve.state_store import metrics
from turboserve.state_store.core.sessions import applied
from turboserve.state_store.database import Database, make_durable
from turboserve.state_store.hot.playheads import Playheads
from turboserve.state_store.repository import controls, outbox, progress
from turboserve.subjects import CHUNK, CHUNKS

DURABLE = "accounting"


class Accounting:
    """Reads headers only. One instance at a time does it, so that chunks are counted in the log's order."""

    def __init__(
        self, database: Database, bus: Bus, playheads: Playheads, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._database, self._bus, self._playheads = database, bus, playheads
        self._clock, self._wake = clock, wake

    async def run(self) -> None:
        await consume(self._bus, CHUNKS, DURABLE, [CHUNK.every], self.count, headers_only=True)

    async def count(self, entry: Entry) -> None:
        """Counting the same chunk again changes nothing."""
        if HEADER not in entry.headers:
            return
        chunk = ChunkHeader.from_headers(entry.headers)
        now = self._clock.wall()
        async with self._database.transaction(durable=False) as db:
            row = await progress.count_chunk(
                db, chunk.session, chunk.index + 1, chunk.control_seq, self._playheads.known(chunk.session)
            )
            if row is None:
                return
            prompts = await controls.mark_applied(db, chunk.session, chunk.control_seq, chunk.index, now)
            events: list[Event] = [applied(row, receipt, chunk.index, now) for receipt in prompts]
            if events:
                await make_durable(db)
                await outbox.add(db, events)
        metrics.chunks.add(1)
        if events:
            self._wake()
