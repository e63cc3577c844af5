"""Counting chunks from the log: how far each session is, and which prompts have been applied."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from turboserve import logs
from turboserve.bus import Bus, Entry, Owners, read_headers
from turboserve.clock import Clock
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import TurboServeError
from turboserve.state_store import metrics
from turboserve.state_store.core.sessions import applied
from turboserve.state_store.hot.playheads import Playheads
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import LogProgress
from turboserve.subjects import ANY_CHUNK, CHUNK, CHUNKS, OWN

CURSOR = "accounting"
RETRY_S = 0.5
TOGETHER_S = 0.05
"""Chunks of so long are counted in one transaction: the database has at most 20 of these in a second."""
MANY = 128
"""So many wait for nothing."""
MEMORY = 20_000
"""Sessions whose applied prompts are remembered; one that is not costs a statement more, and nothing else."""

T = TypeVar("T")

log = logs.get("accounting")


class AlreadyCountedError(Exception):
    """Another instance has counted these chunks."""


class Accounting:
    """Reads headers only, in the log's order, from the position that stands beside the counts.

    One instance leads; if two do for a moment, the position's compare-and-set lets one of them count.
    """

    def __init__(
        self,
        database: Database,
        bus: Bus,
        owners: Owners,
        playheads: Playheads,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self._database, self._bus, self._playheads = database, bus, playheads
        self._clock, self._wake = clock, wake
        self._applied: dict[str, int] = {}
        self._owners = owners

    async def run(self) -> None:
        """Count for ever; returns when another instance has taken over."""
        self._applied.clear()
        position = await self._with_retry(self._position)
        async with aclosing(read_headers(self._bus, CHUNKS, [ANY_CHUNK, OWN.every], position)) as batches:
            async for entries in batches:
                before, position = position, entries[-1].sequence
                try:
                    await self._with_retry(lambda: self.count(entries, before))  # noqa: B023
                except AlreadyCountedError:
                    log.warning("overtaken", position=before)
                    return
                if len(entries) < MANY:
                    await asyncio.sleep(TOGETHER_S)

    async def count(self, entries: Sequence[Entry], position: int) -> None:
        """Count what follows `position`, once: the position moves with the counts or not at all.

        Only chunks that an owner of their session wrote count.
        """
        chunks = [chunk for entry in entries if (chunk := await self._chunk(entry)) is not None]
        # A prompt that is applied is worth a disk's wait; a count would only be counted again.
        fresh = [chunk for chunk in chunks if chunk.control_seq > self._applied.get(chunk.session, 0)]
        newest: dict[str, tuple[int, int]] = {}
        for chunk in chunks:
            index, control_seq = newest.get(chunk.session, (0, 0))
            newest[chunk.session] = max(index, chunk.index), max(control_seq, chunk.control_seq)
        reached = [
            LogProgress(session, index + 1, control_seq, self._playheads.known(session))
            for session, (index, control_seq) in newest.items()
        ]
        now = self._clock.wall()
        told = 0
        async with self._database.transaction(durable=False) as db:
            if not await db.progress.move(CURSOR, position, entries[-1].sequence):
                raise AlreadyCountedError
            rows = await db.progress.count(reached)
            for chunk in fresh:
                if chunk.session not in rows:
                    continue
                receipts = await db.controls.mark_applied(chunk.session, chunk.control_seq, chunk.index, now)
                await db.outbox.add(
                    [applied(rows[chunk.session], receipt, chunk.index, now) for receipt in receipts]
                )
                told += len(receipts)
            if told:
                await db.make_durable()
        for session, row in rows.items():
            self._applied.pop(session, None)
            self._applied[session] = row.applied_control_seq
        while len(self._applied) > MEMORY:
            self._applied.pop(next(iter(self._applied)))
        metrics.chunks.add(len(chunks))
        if told:
            self._wake()

    async def _chunk(self, entry: Entry) -> ChunkHeader | None:
        if OWN.takes(entry.subject):
            self._owners.changed(OWN.token(entry.subject))
            return None
        return await self._owners.header(CHUNK.token(entry.subject), entry)

    async def _position(self) -> int:
        async with self._database.transaction() as db:
            return await db.progress.position(CURSOR)

    async def _with_retry(self, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await work()
            except TurboServeError as error:
                log.warning("counting waits", error=error.detail)
                await asyncio.sleep(RETRY_S)
