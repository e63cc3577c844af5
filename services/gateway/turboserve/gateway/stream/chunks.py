"""The chunk log of one session, read by chunk index.

The stream CHUNKS is shared by all sessions, so an index says nothing about a sequence. What was seen is
remembered; the rest is found by search, since both rise together.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from turboserve.bus import Bus, Entry, Owners, follow, next_entry
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway import metrics
from turboserve.gateway.aio import until
from turboserve.gateway.problems.errors import ChunkGoneError, ChunkNotMadeError
from turboserve.subjects import CHUNK

REMEMBERED = 65_536
RETRY_S = 0.2
STEPS = 500
"""More entries than the log keeps of one subject."""
EMPTY_LOG_AHEAD_S = 5.0
"""An empty log does not say how long its chunks were. Beyond the last known playhead there are at most the
lead and a chunk. Too much costs some lead once; too little, and the worker waits for ever to be caught up."""
T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """One chunk and its place in the stream."""

    header: ChunkHeader
    sequence: int
    payload: bytes

    @property
    def init(self) -> bytes:
        """fMP4 init segment."""
        return self.payload[: self.header.init_bytes]

    @property
    def fragment(self) -> bytes:
        """fMP4 fragment, closed, starting with a key frame."""
        return self.payload[self.header.init_bytes :]


@dataclass(frozen=True)
class StreamStart:
    """Where a viewer begins: chunk `index`, whose first frame is at `start_s`, behind stream `sequence`."""

    index: int
    start_s: float
    sequence: int
    made_s: float = 0.0
    """Media time up to which the log has chunks, or had; 0: it is empty."""


class ChunkLog:
    """Reads what a session's owners wrote, and nothing else.

    All methods but `follow` raise UnavailableError while the broker does not answer.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._owners = Owners(bus, lambda: metrics.foreign_chunks.add(1, {"reason": "owner"}))
        self._sequences: OrderedDict[tuple[str, int], int] = OrderedDict()

    async def listen(self) -> None:
        """Hear of new owners. Called once."""
        await self._owners.listen()

    async def after(self, record: SessionRecord, index: int) -> StreamStart:
        """The place right behind chunk `index` (-1: the beginning).

        Raises ChunkGoneError if the chunk that follows is no longer kept, ChunkNotMadeError if `index` itself
        was never made.
        """
        session = record.id
        newest = await self._newest(session)
        made = record.next_chunk - 1 if newest is None else newest.header.index
        if index > made:
            raise ChunkNotMadeError(
                f"after: {index} is beyond the newest chunk, {made}", field="after", limit=made
            )
        if newest is None:
            if index < made:
                raise _gone(index + 1, record.next_chunk)
            return _behind_all(record, record.playhead_s)
        if index == made:
            return StreamStart(index + 1, newest.header.end_s, newest.sequence, newest.header.end_s)
        found = await self._find(session, index + 1, newest)
        return StreamStart(found.header.index, found.header.start_s, found.sequence - 1, newest.header.end_s)

    async def at(self, record: SessionRecord, playhead_s: float) -> StreamStart:
        """The chunk that contains `playhead_s`; if that is no longer kept, the oldest that is."""
        session = record.id
        newest = await self._newest(session)
        if newest is None:
            return _behind_all(record, playhead_s)
        header = newest.header
        if playhead_s >= header.end_s:
            return StreamStart(header.index + 1, header.end_s, newest.sequence, header.end_s)
        # All chunks but the first have one length, so this is exact for all of them.
        behind = math.ceil(max(0.0, header.start_s - playhead_s) * header.fps / header.frames - 1e-6)
        try:
            found = await self._find(session, max(0, header.index - behind), newest)
        except ChunkGoneError as gone:
            found = await self._find(session, int(gone.limit or 0), newest)
        return StreamStart(found.header.index, found.header.start_s, found.sequence - 1, header.end_s)

    async def follow(
        self, session: str, start: StreamStart, ended: asyncio.Event, made: Callable[[], Awaitable[int]]
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks from `start` on, each once, in order; over when `ended` is set and the log is read out.

        `made`: how many chunks the session has by its row. Raises ChunkGoneError if the log dropped the next
        one before it was read, and what `made` raises, which is asked when the log itself was lost.
        """
        expected = start.index

        async def lost() -> None:
            # No later chunk would show the gap: the worker waits for a playhead that the viewer cannot reach.
            oldest = await _answered(partial(self._oldest, session))
            kept = await _answered(made) if oldest is None else oldest.header.index
            if kept > expected:
                raise _gone(expected, kept)

        async with aclosing(self._entries(session, start.sequence, ended, lost)) as entries:
            async for entry in entries:
                chunk = await self._followed(session, entry)
                if chunk is None or chunk.header.index < expected:
                    continue
                if chunk.header.index > expected:
                    oldest = await _answered(partial(self._oldest, session))
                    if oldest is None or oldest.header.index > expected:
                        raise _gone(expected, chunk.header.index)
                    # The log has all chunks from the oldest on, so this one came before its turn.
                    metrics.foreign_chunks.add(1, {"reason": "order"})
                    continue
                expected += 1
                yield chunk

    async def _entries(
        self, session: str, position: int, ended: asyncio.Event, lost: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[Entry, None]:
        while unnamed := await _answered(partial(self._owners.first_unnamed, session, position + 1)):
            _, entry = unnamed
            position = entry.sequence
            yield entry
        subject = CHUNK.of(session)
        live = follow(
            self._bus, CHUNK.stream, subject, CHUNK.live(session), after_sequence=position, on_lost=lost
        )
        async with aclosing(until(live, ended)) as entries:
            async for entry in entries:
                position = entry.sequence
                yield entry
        while (last := await next_entry(self._bus, CHUNK.stream, subject, position + 1)) is not None:
            position = last.sequence
            yield last

    async def _followed(self, session: str, entry: Entry) -> Chunk | None:
        """As `_chunk`, waiting for the broker for as long as it takes."""
        return await _answered(partial(self._chunk, session, entry))

    async def _oldest(self, session: str) -> Chunk | None:
        """The first chunk after which none is missing."""
        found = await self._owners.oldest(session)
        return None if found is None else self._remember(*found)

    async def _newest(self, session: str) -> Chunk | None:
        found = await self._owners.newest(session)
        return None if found is None else self._remember(*found)

    async def _from(self, session: str, sequence: int) -> Chunk | None:
        found = await self._owners.first(session, sequence)
        return None if found is None else self._remember(*found)

    async def _find(self, session: str, index: int, newest: Chunk) -> Chunk:
        """Chunk `index`, which is at most `newest`. Raises ChunkGoneError."""
        if index == newest.header.index:
            return newest
        known = self._sequences.get((session, index))
        if known is not None:
            chunk = await self._from(session, known)
            if chunk is not None and (chunk.header.index, chunk.header.epoch) == (index, newest.header.epoch):
                # One owner's chunks are dropped oldest first, so none is missing behind it.
                return chunk
        oldest = await self._oldest(session)
        if oldest is None or index < oldest.header.index:
            raise _gone(index, newest.header.index + 1 if oldest is None else oldest.header.index)
        low, high_index, high = oldest, newest.header.index, newest.sequence
        guess_evenly = True
        while low.header.index < index:
            # Chunk `index` lies in (low, high]. Chunks come at an even rate, so interpolation is mostly right
            # at once; every second step halves instead, so that it is never slow.
            width = high - low.sequence
            if width <= 1:
                return await self._step(session, index, low)
            share = (index - low.header.index) / (high_index - low.header.index) if guess_evenly else 0.5
            guess_evenly = not guess_evenly
            probe = low.sequence + max(1, min(width, math.floor(width * share)))
            chunk = await self._from(session, probe)
            if chunk is None:
                raise _gone(index, newest.header.index)
            if chunk.header.index <= index:
                low = chunk
            else:
                high, high_index = probe, chunk.header.index
        if low.header.index != index:
            raise _gone(index, low.header.index)
        return low

    async def _step(self, session: str, index: int, low: Chunk) -> Chunk:
        """Chunk `index` behind `low`, entry by entry: an entry with the header of an owner came before its
        turn, so that no search by index ends. Raises ChunkGoneError."""
        position = low.sequence
        for _ in range(STEPS):
            chunk = await self._from(session, position + 1)
            if chunk is None:
                break
            if chunk.header.index == index:
                return chunk
            position = chunk.sequence
        raise _gone(index, low.header.index + 1)

    async def _chunk(self, session: str, entry: Entry) -> Chunk | None:
        """What `entry` holds; None if that is no chunk that an owner of `session` wrote."""
        header = await self._owners.header(session, entry, len(entry.data))
        return None if header is None else self._remember(header, entry)

    def _remember(self, header: ChunkHeader, entry: Entry) -> Chunk:
        self._sequences[header.session, header.index] = entry.sequence
        self._sequences.move_to_end((header.session, header.index))
        while len(self._sequences) > REMEMBERED:
            self._sequences.popitem(last=False)
        return Chunk(header, entry.sequence, entry.data)


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again and again while what is asked is away."""
    while True:
        try:
            return await ask()
        except UnavailableError:
            await asyncio.sleep(RETRY_S)


def _behind_all(record: SessionRecord, playhead_s: float) -> StreamStart:
    """Where to begin in an empty log: nothing was made, or all of it is no longer kept."""
    if not record.next_chunk:
        return StreamStart(0, 0.0, 0)
    return StreamStart(record.next_chunk, playhead_s + EMPTY_LOG_AHEAD_S, 0)


def _gone(index: int, oldest: int) -> ChunkGoneError:
    return ChunkGoneError(
        f"chunk {index} is no longer kept; the oldest that is kept is {oldest}", field="after", limit=oldest
    )
