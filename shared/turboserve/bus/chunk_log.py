"""Reads the chunk log of a session by chunk index.

All sessions share the stream CHUNKS, so the index of a chunk does not determine its sequence. The sequences
of chunks that were read are remembered. Others are found by search, since sequences increase with indexes.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from turboserve.bus.client import Bus
from turboserve.bus.follower import follow
from turboserve.bus.log import Entry, next_entry
from turboserve.bus.owners import Owners
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import ChunkGoneError
from turboserve.contracts.sessions import SessionRecord
from turboserve.static_frozen import statically_frozen
from turboserve.subjects import CHUNK
from turboserve.tasks import answered, until

REMEMBERED = 65_536
STEPS = 500
"""Maximum number of entries in a search entry by entry: more than the log keeps of one subject."""
EMPTY_LOG_AHEAD_S = 5.0
"""Seconds beyond the last known playhead at which a viewer of an empty log starts.

An empty log does not show how long its chunks were. They reached beyond the playhead by at most the lead and
one chunk. Too large a value costs some lead once. With too small a value, the worker would wait forever for
the playhead.
"""


@statically_frozen()
class Chunk:
    """One chunk and its place in the stream."""

    header: ChunkHeader
    sequence: int
    payload: bytes
    traceparent: str | None = None
    """Trace context of the chunk's append. None: it was not traced."""

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
    """Where a viewer starts: chunk `index`, whose first frame is at `start_s`, after stream `sequence`."""

    index: int
    start_s: float
    sequence: int
    made_s: float = 0.0
    """Media time at which the newest chunk ends, seconds; 0 if the log is empty."""


class ChunkLog:
    """Reads chunks that an owner of the session wrote, and ignores other entries.

    All methods except `follow` raise UnavailableError while the broker does not answer.
    """

    def __init__(self, bus: Bus, on_foreign: Callable[[str], None] = lambda _reason: None) -> None:
        """`on_foreign` is called for each entry that is ignored, with the reason: `owner` or `order`."""
        self._bus, self._on_foreign = bus, on_foreign
        self._owners = Owners(bus, lambda: on_foreign("owner"))
        self._sequences: OrderedDict[tuple[str, int], int] = OrderedDict()
        """(session, index) → sequence of the newest `REMEMBERED` chunks."""

    async def listen(self) -> None:
        """Subscribe to changes of owners. Call this once."""
        await self._owners.listen()

    async def after(self, record: SessionRecord, index: int) -> StreamStart:
        """Return the start directly after chunk `index` (-1: the beginning of the video).

        Raises ChunkGoneError if the next chunk is no longer kept, and if chunk `index` is beyond the newest
        chunk: either the log has lost its end together with the owner, or no chunk had this index.
        """
        session = record.id
        newest = await self._newest(session)
        in_log = -1 if newest is None else newest.header.index
        # The log may have lost chunks that the row has counted.
        made = max(in_log, record.next_chunk - 1)
        if index > made:
            raise ChunkGoneError(
                f"after: {index} is beyond the newest chunk, {made}", field="after", limit=made + 1
            )
        if index < made and (newest is None or in_log <= index):
            raise _gone(index + 1, made + 1)
        if newest is None:
            return _behind_all(record, record.playhead_s)
        if index >= in_log:
            header = newest.header
            # All chunks except the first have the same length.
            end_s = header.end_s + (index - in_log) * header.frames / header.fps
            return StreamStart(index + 1, end_s, newest.sequence, end_s)
        found = await self._find(session, index + 1, newest)
        return StreamStart(found.header.index, found.header.start_s, found.sequence - 1, newest.header.end_s)

    async def at(self, record: SessionRecord, playhead_s: float) -> StreamStart:
        """Return the start at the chunk that contains `playhead_s`; the oldest chunk if that one is gone."""
        session = record.id
        newest = await self._newest(session)
        if newest is None:
            return _behind_all(record, playhead_s)
        header = newest.header
        if playhead_s >= header.end_s:
            return StreamStart(header.index + 1, header.end_s, newest.sequence, header.end_s)
        # All chunks except the first have the same length, so this number is exact.
        behind = math.ceil(max(0.0, header.start_s - playhead_s) * header.fps / header.frames - 1e-6)
        try:
            found = await self._find(session, max(0, header.index - behind), newest)
        except ChunkGoneError as gone:
            found = await self._find(session, int(gone.limit or 0), newest)
        return StreamStart(found.header.index, found.header.start_s, found.sequence - 1, header.end_s)

    async def follow(
        self, session: str, start: StreamStart, ended: asyncio.Event, made: Callable[[], Awaitable[int]]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield chunks from `start` on, each once and in order. Ends when `ended` is set and the log is read.

        `made` returns the number of the session's chunks by its row. It is called when the log was lost.
        Raises ChunkGoneError if the log dropped the next chunk before it was read, and the errors of `made`.
        """
        expected, epoch = start.index, 0
        ahead: int | None = None
        """Index of the previous entry, if that came before its turn."""

        async def lost() -> None:
            # No later chunk would show the gap: the worker waits for a playhead beyond the viewer's reach.
            if await log_has_more():
                oldest = await answered(partial(self._oldest, session))
                kept = 0 if oldest is None else oldest.header.index
            else:
                # The log had what the row has counted. Chunks that came since the first look are not lost.
                counted = await answered(made)
                kept = 0 if await log_has_more() else counted
            if kept > expected:
                raise _gone(expected, kept)

        async def log_has_more() -> bool:
            newest = await answered(partial(self._newest, session))
            return newest is not None and newest.header.index >= expected

        async with aclosing(self._entries(session, start.sequence, ended, lost)) as entries:
            async for entry in entries:
                chunk = await self._followed(session, entry)
                if chunk is None:
                    continue
                header = chunk.header
                if header.index < expected:
                    if 0 < epoch < header.epoch:
                        # Broker and owner lost what the viewer has seen, and the new owner goes on before it.
                        raise _gone(expected, header.index)
                    continue
                if header.index > expected:
                    if header.contiguous_from > expected:
                        raise _gone(expected, header.contiguous_from)
                    oldest = await answered(partial(self._oldest, session))
                    if oldest is None or oldest.header.index > expected:
                        raise _gone(expected, header.index)
                    if ahead == header.index - 1:
                        # An owner that does not know of a hole in the log continues behind it.
                        raise _gone(expected, ahead)
                    # The log has all chunks from the oldest on, so this entry is out of order.
                    ahead = header.index
                    self._on_foreign("order")
                    continue
                expected, epoch, ahead = expected + 1, header.epoch, None
                yield chunk

    async def _entries(
        self, session: str, position: int, ended: asyncio.Event, lost: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[Entry, None]:
        while unnamed := await answered(partial(self._owners.first_unnamed, session, position + 1)):
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
        """Return the chunk in `entry`; None if no owner of `session` wrote it. Waits for the broker."""
        header, proven = self._owners.known_header(session, entry, len(entry.data))
        if header is not None and not proven:
            header = await answered(partial(self._owners.header, session, entry, len(entry.data)))
        return None if header is None else self._remember(header, entry)

    async def _oldest(self, session: str) -> Chunk | None:
        """Return the first chunk after which no chunk is missing."""
        found = await self._owners.oldest(session)
        return None if found is None else self._remember(*found)

    async def _newest(self, session: str) -> Chunk | None:
        found = await self._owners.newest(session)
        return None if found is None else self._remember(*found)

    async def _from(self, session: str, sequence: int) -> Chunk | None:
        found = await self._owners.first(session, sequence)
        return None if found is None else self._remember(*found)

    async def _find(self, session: str, index: int, newest: Chunk) -> Chunk:
        """Find chunk `index`, which is at most that of `newest`. Raises ChunkGoneError."""
        if index == newest.header.index:
            return newest
        if index < newest.header.contiguous_from:
            raise _gone(index, newest.header.contiguous_from)
        known = self._sequences.get((session, index))
        if known is not None:
            chunk = await self._from(session, known)
            if chunk is not None and (chunk.header.index, chunk.header.epoch) == (index, newest.header.epoch):
                # The chunks of one owner are dropped oldest first, so none is missing after this one.
                return chunk
        oldest = await self._oldest(session)
        if oldest is None or index < oldest.header.index:
            raise _gone(index, newest.header.index + 1 if oldest is None else oldest.header.index)
        low, high_index, high = oldest, newest.header.index, newest.sequence
        guess_evenly = True
        while low.header.index < index:
            # Chunk `index` lies in (low, high]. Chunks arrive at an even rate, so interpolation mostly finds
            # it at once. Every second step halves the interval instead, so that the search is never slow.
            width = high - low.sequence
            if width <= 1:
                return await self._step(session, index, low, newest.header.index)
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

    async def _step(self, session: str, index: int, low: Chunk, newest: int) -> Chunk:
        """Find chunk `index` after `low`, entry by entry. `newest`: index of the newest chunk.

        Raises ChunkGoneError with the next chunk that the log has.

        A search by index does not find the chunk if an entry with an owner's header is out of order.
        """
        position, following = low.sequence, newest
        for _ in range(STEPS):
            chunk = await self._from(session, position + 1)
            if chunk is None:
                break
            if chunk.header.index == index:
                return chunk
            if chunk.header.index > index:
                following = min(following, chunk.header.index)
            position = chunk.sequence
        raise _gone(index, following)

    def _remember(self, header: ChunkHeader, entry: Entry) -> Chunk:
        self._sequences[header.session, header.index] = entry.sequence
        if len(self._sequences) > REMEMBERED:
            self._sequences.popitem(last=False)
        return Chunk(header, entry.sequence, entry.data, entry.headers.get("traceparent"))


def _behind_all(record: SessionRecord, playhead_s: float) -> StreamStart:
    """Return the start in an empty log: no chunk was made, or none is kept any more."""
    if not record.next_chunk:
        return StreamStart(0, 0.0, 0)
    return StreamStart(record.next_chunk, playhead_s + EMPTY_LOG_AHEAD_S, 0)


def _gone(index: int, oldest: int) -> ChunkGoneError:
    return ChunkGoneError(
        f"chunk {index} is no longer kept; the oldest that is kept is {oldest}", field="after", limit=oldest
    )
