"""Searches one subject of a session's chunk log for the first or the newest chunk of an owner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from turboserve.bus.client import Bus
from turboserve.bus.log import Entry, next_entry
from turboserve.contracts.chunks import ChunkHeader
from turboserve.subjects import CHUNKS

Found = tuple[ChunkHeader, Entry]
HeaderOf = Callable[[str, Entry, int], Awaitable[ChunkHeader | None]]
"""Session, entry and size of its payload → the header; None for an entry that no owner wrote."""
WINDOW = 64
"""Width of the first window of stream sequences in which the newest chunk of a session is searched."""


class ChunkSearch:
    """Reads entry after entry and skips those that no owner wrote. Raises UnavailableError."""

    def __init__(self, bus: Bus, header_of: HeaderOf) -> None:
        self._bus, self._header_of = bus, header_of

    async def first(self, session: str, subject: str, start: int, end: int | None) -> Found | None:
        """Return the first chunk of an owner on `subject` from stream sequence `start` to before `end`."""
        while (entry := await next_entry(self._bus, CHUNKS, subject, start)) is not None:
            if end is not None and entry.sequence >= end:
                break
            if (header := await self._header_of(session, entry, len(entry.data))) is not None:
                return header, entry
            start = entry.sequence + 1
        return None

    async def newest(self, session: str, subject: str, after: int, end: int) -> Found | None:
        """Return the newest chunk of an owner on `subject` after stream sequence `after` and before `end`.

        The broker finds only the first entry from a sequence on. This method therefore reads windows from the
        end backwards, each four times as wide as the previous one.
        """
        width, newest = WINDOW, None
        while newest is None and end > after + 1:
            position = start = max(after + 1, end - width)
            while (entry := await next_entry(self._bus, CHUNKS, subject, position)) is not None:
                if entry.sequence >= end:
                    break
                if (header := await self._header_of(session, entry, len(entry.data))) is not None:
                    newest = header, entry
                position = entry.sequence + 1
            end, width = start, width * 4
        return newest
