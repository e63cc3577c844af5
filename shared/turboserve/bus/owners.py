"""Whether the owner of a session wrote an entry of its chunk log.

The fence binds only writers that name it, and every worker may append to the log. `own.<session>` says who
owned the session at each sequence of the stream, so a reader can tell what anybody else has appended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from nats.aio.msg import Msg as NatsMsg
from pydantic import ValidationError

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.log import Entry, last_entry, next_entry
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import InvalidInputError
from turboserve.subjects import CHUNK, CHUNKS, OWN

log = logs.get("owners")

REMEMBERED = 20_000
"""Sessions whose owners are kept in memory; those of any other are read again when they are needed."""
WINDOW = 64
"""Sequences of the stream, of all sessions, that are looked through first for the newest chunk of one."""


@dataclass(frozen=True)
class Owned:
    """One entry of `own.<session>`."""

    sequence: int
    epoch: int
    worker: str | None


@dataclass
class _History:
    """What is known of `own.<session>`, oldest first."""

    entries: list[Owned]
    current: bool = False
    """Whether it was read to its end, and no later entry has been heard of since that began."""
    heard: bool = False
    """Whether a later entry was heard of."""

    def at(self, sequence: int) -> Owned | None:
        """The newest entry before stream `sequence`."""
        position = bisect_left(self.entries, sequence, key=lambda own: own.sequence)
        return self.entries[position - 1] if position else None

    def names(self, epoch: int, worker: str) -> bool:
        """Whether `worker` was the owner at `epoch`."""
        return any((own.epoch, own.worker) == (epoch, worker) for own in self.entries)

    def has_written(self, header: ChunkHeader, sequence: int) -> bool:
        """Whether the owner at stream `sequence` is the one that the chunk's header names."""
        own = self.at(sequence)
        if own is not None:
            return (own.epoch, own.worker) == (header.epoch, header.worker)
        # The stream keeps as many entries of a subject as it keeps chunks: of a session with more owners than
        # that, the first are unknown. Their epochs are lower than the oldest that is known.
        return bool(self.entries) and 1 <= header.epoch < self.entries[0].epoch


class Owners:
    """The owners of sessions, as the log has them. What is not in memory is read from the log.

    `on_foreign` is called for each entry that no owner wrote.
    """

    def __init__(self, bus: Bus, on_foreign: Callable[[], None], remembered: int = REMEMBERED) -> None:
        self._bus, self._on_foreign, self._remembered = bus, on_foreign, remembered
        self._known: OrderedDict[str, _History] = OrderedDict()

    async def listen(self) -> None:
        """Hear of new owners at once; without it a former owner counts until its successor's first chunk.

        For services that `OWN` lists as readers.
        """

        async def hear(raw: NatsMsg) -> None:
            self.changed(raw.subject.removeprefix(OWN.live("")))

        await self._bus.client.subscribe(OWN.live("*"), cb=hear)

    def changed(self, session: str) -> None:
        """The session may have another owner: the log is asked before the next answer."""
        if (known := self._known.get(session)) is not None:
            known.current, known.heard = False, True

    async def header(
        self, session: str, entry: Entry, payload_bytes: int | None = None
    ) -> ChunkHeader | None:
        """The header of a chunk that an owner of `session` wrote; None for anything else, which is counted.

        `payload_bytes`: of its payload, if that is known. Raises UnavailableError.
        """
        try:
            header = ChunkHeader.of_entry(session, entry.headers, payload_bytes)
        except InvalidInputError as error:
            self._foreign(session, entry, error.detail)
            return None
        if await self._has_written(session, header, entry.sequence):
            return header
        self._foreign(session, entry, f"{header.worker} is not its owner at epoch {header.epoch}")
        return None

    async def has_owned(self, session: str, epoch: int, worker: str) -> bool:
        """Whether `worker` owned `session` at `epoch`, now or before. Raises UnavailableError."""
        known = self._known.get(session)
        if known is not None and known.names(epoch, worker):
            return True
        return (await self._read(session)).names(epoch, worker)

    async def newest(self, session: str) -> tuple[ChunkHeader, Entry] | None:
        """The newest chunk of `session` that an owner wrote, or None. Raises UnavailableError."""
        entry = await last_entry(self._bus, CHUNKS, CHUNK.of(session))
        if entry is None:
            return None
        header = await self.header(session, entry, len(entry.data))
        return (header, entry) if header else await self._newest_before(session, entry.sequence)

    async def first(self, session: str, sequence: int) -> tuple[ChunkHeader, Entry] | None:
        """The first chunk at or after stream `sequence` that an owner wrote. Raises UnavailableError."""
        while (entry := await next_entry(self._bus, CHUNKS, CHUNK.of(session), sequence)) is not None:
            if (header := await self.header(session, entry, len(entry.data))) is not None:
                return header, entry
            sequence = entry.sequence + 1
        return None

    async def _newest_before(self, session: str, end: int) -> tuple[ChunkHeader, Entry] | None:
        """The newest chunk before stream sequence `end`, behind which the log has nothing of an owner.

        The broker finds only the first entry from a sequence on: windows before the end are read, each four
        times as wide as the one behind it.
        """
        width, newest = WINDOW, None
        while newest is None and end > 1:
            position = start = max(1, end - width)
            while (entry := await next_entry(self._bus, CHUNKS, CHUNK.of(session), position)) is not None:
                if entry.sequence >= end:
                    break
                if (header := await self.header(session, entry, len(entry.data))) is not None:
                    newest = header, entry
                position = entry.sequence + 1
            end, width = start, width * 4
        return newest

    async def _has_written(self, session: str, header: ChunkHeader, sequence: int) -> bool:
        known = self._known.get(session)
        if known is not None and known.current and known.has_written(header, sequence):
            self._known.move_to_end(session)
            return True
        # Either the owner has changed, or the stream is another, or it is somebody else's.
        return (await self._read(session)).has_written(header, sequence)

    async def _read(self, session: str) -> _History:
        """Read what follows the newest entry that is known, or everything if that is no longer there."""
        known = self._known.get(session) or _History([])
        last = known.entries[-1] if known.entries else None
        history = self._known[session] = _History(list(known.entries))
        self._known.move_to_end(session)
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)
        if last is not None and await self._next(session, last.sequence) != last:
            history.entries.clear()
        position = history.entries[-1].sequence + 1 if history.entries else 1
        while (own := await self._next(session, position)) is not None:
            history.entries.append(own)
            position = own.sequence + 1
        # What was heard of meanwhile may not have been read.
        history.current = not history.heard
        return history

    async def _next(self, session: str, sequence: int) -> Owned | None:
        entry = await next_entry(self._bus, CHUNKS, OWN.of(session), sequence)
        if entry is None:
            return None
        try:
            own = Ownership.from_bytes(entry.data)
        except ValidationError:
            # Only the state store writes here. What it did not write makes nobody an owner.
            return Owned(entry.sequence, 0, None)
        return Owned(entry.sequence, own.epoch, own.worker)

    def _foreign(self, session: str, entry: Entry, reason: str) -> None:
        log.warning("no owner's chunk", session=session, sequence=entry.sequence, reason=reason)
        self._on_foreign()
