"""Counts chunks from the log: progress, prompts, controls, usage of sessions. Counts their viewers' time."""

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
from turboserve.contracts.sessions import PromptReceipt
from turboserve.contracts.workers import Playhead
from turboserve.state_store import metrics
from turboserve.state_store.core.controls import settle
from turboserve.state_store.core.receipts import SettledControl
from turboserve.state_store.core.tenants import day_of
from turboserve.state_store.hot.session_state import Playheads
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import LogProgress, UsageShare
from turboserve.subjects import ANY_CHUNK, CHUNK, CHUNKS, OWN
from turboserve.telemetry_names import PROMPT_OUTCOME

CURSOR = "accounting"
RETRY_S = 0.5
FLUSH_S = 5.0
"""Interval at which viewers' time is written, seconds."""
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
    ) -> None:
        """`interval_s`: see `Settings.progress_interval_s`. `wake` is called when there are new events."""
        self._database, self._bus, self._playheads = database, bus, playheads
        self._clock, self._interval_s, self._wake = clock, interval_s, wake
        self._applied: dict[str, int] = {}
        self._owners = owners

    async def run(self) -> None:
        """Count until another instance has taken over."""
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
            counted = (rows[chunk.session] for chunk in chunks if chunk.session in rows)
            shares = [UsageShare(row.tenant, row.key, chunks=1) for row in counted]
            await db.progress.add_usage(day_of(now), shares)
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


class ViewerTime:
    """Adds the time of viewers, as gateways report it, to the usage of their tenants.

    Each instance adds what it has received. A crash loses at most the time of `FLUSH_S`.
    """

    def __init__(self, database: Database, playheads: Playheads, clock: Clock) -> None:
        self._database, self._playheads, self._clock = database, playheads, clock
        self._seconds: dict[str, float] = {}
        """Seconds that are not written yet, by session."""

    async def report(self, message: Playhead, body: bytes) -> None:
        """Handle a playhead: its viewers' time counts here, and its position in `Playheads`."""
        if message.viewer_s:
            self._seconds[message.session] = self._seconds.get(message.session, 0.0) + message.viewer_s
        await self._playheads.report(message, body)

    async def run(self) -> None:
        """Write every `FLUSH_S`; never returns."""
        while True:
            await asyncio.sleep(FLUSH_S)
            seconds, self._seconds = self._seconds, {}
            if not seconds:
                continue
            try:
                async with self._database.transaction(durable=False) as db:
                    await db.progress.add_viewer_time(day_of(self._clock.wall()), seconds)
            except TurboServeError as error:
                # The outcome of a commit may be unknown: better too little than the same time twice.
                log.warning("viewers' time is not counted", sessions=len(seconds), error=error.detail)


def _measure(settled: Sequence[SettledControl], now: float) -> None:
    """Count the prompts and controls that chunks settled."""
    for each in settled:
        is_prompt = isinstance(each.receipt, PromptReceipt)
        outcome = {PROMPT_OUTCOME: "applied" if each.superseded_by is None else "superseded"}
        (metrics.prompts if is_prompt else metrics.controls).add(1, outcome)
        if each.superseded_by is None:
            duration = metrics.prompt_duration if is_prompt else metrics.control_duration
            duration.record(max(0.0, now - each.receipt.accepted_at))
