"""Counts chunks from the log: progress, prompts, controls, usage of sessions, history of their workers.

Counts use by their viewers, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from turboserve import logs
from turboserve.bus import Bus, Entry, Lag, Owners, read_headers
from turboserve.clock import Clock
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.sessions import PromptReceipt
from turboserve.state_store import metrics
from turboserve.state_store.core.controls import settle
from turboserve.state_store.core.receipts import SettledControl
from turboserve.state_store.core.tenants import hour_of
from turboserve.state_store.hot.session_state import Playheads
from turboserve.state_store.periodic_writes import WorkerChunks
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import LogProgress, UsageShare
from turboserve.subjects import ANY_CHUNK, CHUNK, CHUNKS, OWN
from turboserve.telemetry_names import PROMPT_OUTCOME

CURSOR = "accounting"
RETRY_S = 0.5
MANY = 128
"""A batch of at least this many entries is followed by the next one without a pause."""
MEMORY = 20_000
"""Number of sessions whose settled controls are remembered. For others, each one costs one more statement."""

T = TypeVar("T")

log = logs.get("accounting")


class AlreadyCountedError(Exception):
    """Another instance has counted these chunks."""


class Accounting:
    """Reads chunk headers in the order of the log, from the position that is stored with the counts.

    One instance leads. If two do for a moment, the compare-and-set of the position lets only one count.
    """

    def __init__(
        self,
        database: Database,
        bus: Bus,
        owners: Owners,
        playheads: Playheads,
        clock: Clock,
        interval_s: float,
        wake: Callable[[], None],
        history: WorkerChunks,
    ) -> None:
        """`interval_s`: see `Settings.progress_interval_s`. `wake` is called when there are new events."""
        self._database, self._bus, self._playheads = database, bus, playheads
        self._clock, self._interval_s, self._wake = clock, interval_s, wake
        self._applied: dict[str, int] = {}
        self._lag = Lag()
        self._owners, self._history = owners, history

    def warning(self) -> str | None:
        """Return for how long counted chunks have been behind the log; None if they are not."""
        return self._lag.warning(self._clock.monotonic())

    async def run(self) -> None:
        """Count until another instance has taken over."""
        try:
            await self._count_forever()
        finally:
            # Another instance counts what is left.
            self._lag.note(False, self._clock.monotonic())

    async def _count_forever(self) -> None:
        self._applied.clear()
        position = await self._with_retry(self._position)
        async with aclosing(read_headers(self._bus, CHUNKS, [ANY_CHUNK, OWN.every], position)) as batches:
            async for entries in batches:
                before, position = position, entries[-1].sequence
                self._lag.note(True, self._clock.monotonic())
                try:
                    await self._with_retry(lambda: self.count(entries, before))  # noqa: B023
                except AlreadyCountedError:
                    log.warning("overtaken", position=before)
                    return
                if len(entries) < MANY:
                    self._lag.note(False, self._clock.monotonic())
                    await asyncio.sleep(self._interval_s)

    async def count(self, entries: Sequence[Entry], position: int) -> None:
        """Count `entries`, which follow `position`, once: position and counts change in one transaction.

        Only chunks that an owner of their session wrote count.
        """
        chunks = [chunk for entry in entries if (chunk := await self._chunk(entry)) is not None]
        # Applied controls wait for the disk. Counts need not: if they are lost, the chunks are counted again.
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
        receipts: list[SettledControl] = []
        async with self._database.transaction(durable=False) as db:
            if not await db.progress.move(CURSOR, position, entries[-1].sequence):
                raise AlreadyCountedError
            rows = await db.progress.count(reached)
            counted = ((rows[chunk.session], chunk) for chunk in chunks if chunk.session in rows)
            shares = [
                UsageShare(row.tenant, row.key, row.model, chunks=1, video_seconds=chunk.frames / chunk.fps)
                for row, chunk in counted
            ]
            await db.progress.add_usage(hour_of(now), shares)
            for chunk in fresh:
                if chunk.session not in rows:
                    continue
                settled = await db.controls.settle(chunk.session, chunk.control_seq, chunk.index, now)
                if not settled:
                    continue
                # Counting has locked the row, so no other transaction numbers an event meanwhile.
                change = settle(rows[chunk.session], settled, chunk.index, now)
                rows[chunk.session] = change.record
                await db.progress.number_events(chunk.session, change.record.event_sequence)
                await db.outbox.add(change.events)
                receipts += settled
            if receipts:
                await db.make_durable()
        for chunk in chunks:
            if chunk.session in rows:
                self._history.add(chunk)
        for session, row in rows.items():
            self._applied.pop(session, None)
            self._applied[session] = row.applied_control_seq
        while len(self._applied) > MEMORY:
            self._applied.pop(next(iter(self._applied)))
        metrics.chunks.add(len(chunks))
        if receipts:
            _measure(receipts, now)
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
                log.warning("chunk accounting delayed", error=error.detail)
                await asyncio.sleep(RETRY_S)


def _measure(settled: Sequence[SettledControl], now: float) -> None:
    """Count the prompts and controls that chunks settled."""
    for each in settled:
        is_prompt = isinstance(each.receipt, PromptReceipt)
        outcome = {PROMPT_OUTCOME: "applied" if each.superseded_by is None else "superseded"}
        (metrics.prompts if is_prompt else metrics.controls).add(1, outcome)
        if each.superseded_by is None:
            duration = metrics.prompt_duration if is_prompt else metrics.control_duration
            duration.record(max(0.0, now - each.receipt.accepted_at))
