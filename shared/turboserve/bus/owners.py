"""Decides which entries of a session's chunk log were written by its owners.

The fence binds only writers that name it, and every worker may append on subjects of its own identity.
`own.<session>` names the owner at each sequence of the stream. An entry is valid if the owner at its sequence
has the identity in the entry's subject and is the worker that the entry's header names.

The broker keeps the newest entries of each subject, so an identity's new entries displace only its own. A
session that returns to an identity may lose chunks in the middle: see `Owners.oldest`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from cachetools import LRUCache
from nats.aio.msg import Msg as NatsMsg
from pydantic import ValidationError

from turboserve import logs
from turboserve.bus.chunk_search import ChunkSearch, Found
from turboserve.bus.client import Bus
from turboserve.bus.log import Entry, last_entry, next_entry
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import IncompatibleVersionError, InvalidInputError
from turboserve.contracts.versions import MEMBER, SchemaVersionError
from turboserve.subject_types import identity_of
from turboserve.subjects import CHUNK, CHUNK_UNNAMED, CHUNKS, OWN


@dataclass(frozen=True)
class Owned:
    """One entry of `own.<session>`."""

    sequence: int
    epoch: int
    worker: str | None

    @property
    def identity(self) -> str | None:
        return None if self.worker is None else identity_of(self.worker)


@dataclass
class History:
    """The known entries of `own.<session>`."""

    entries: list[Owned]
    """Oldest first."""
    unnamed_until: int
    """Sequence of the newest chunk from earlier versions, whose subject names no identity. 0: none."""
    current: bool = False
    """Whether the subject was read to its end, and no newer entry was announced since that reading began."""
    heard: bool = False
    """Whether a newer entry was announced."""

    def at(self, sequence: int) -> Owned | None:
        """Return the newest entry before stream `sequence`."""
        if self.entries and self.entries[-1].sequence < sequence:
            return self.entries[-1]
        position = bisect_left(self.entries, sequence, key=lambda own: own.sequence)
        return self.entries[position - 1] if position else None

    def names(self, epoch: int, worker: str) -> bool:
        """Whether `worker` was the owner at `epoch`."""
        return any((own.epoch, own.worker) == (epoch, worker) for own in self.entries)

    def has_written(self, header: ChunkHeader, sequence: int) -> bool:
        """Whether the owner before stream `sequence` is the one that the chunk's header names."""
        own = self.at(sequence)
        if own is not None:
            return (own.epoch, own.worker) == (header.epoch, header.worker)
        # The stream keeps a limited number of entries per subject. A session with more owners than that has
        # unknown first owners. Their epochs are lower than the oldest known epoch.
        return bool(self.entries) and 1 <= header.epoch < self.entries[0].epoch

    @property
    def complete(self) -> bool:
        """Whether the log has at least one owner, and all owners that the session ever had."""
        return bool(self.entries) and self.entries[0].epoch <= 1

    @property
    def identities(self) -> set[str]:
        return {own.identity for own in self.entries if own.identity is not None}

    def stints(self) -> list[tuple[Owned, int | None]]:
        """Return each owner's entry, and the sequence of the next owner's entry (None for the newest)."""
        ends = [own.sequence for own in self.entries[1:]]
        return [(own, end) for own, end in zip(self.entries, [*ends, None], strict=True) if own.worker]

    def subjects(self, session: str, own: Owned) -> list[str]:
        """Return the subjects to which this owner appended, in the order of its chunks."""
        assert own.worker is not None
        unnamed = [CHUNK_UNNAMED.of(session)] if own.sequence < self.unnamed_until else []
        return [*unnamed, CHUNK.by(session, own.worker)]


log = logs.get("owners")

REMEMBERED = 20_000
"""Sessions whose owners are kept in memory. The owners of other sessions are read again when needed."""


class Owners:
    """The owners of sessions by the log, cached in memory.

    `on_foreign` is called for each entry that no owner wrote.
    """

    def __init__(self, bus: Bus, on_foreign: Callable[[], None], remembered: int = REMEMBERED) -> None:
        self._bus, self._on_foreign = bus, on_foreign
        self._known: LRUCache[str, History] = LRUCache(remembered)
        self._search = ChunkSearch(bus, self.header)

    async def listen(self) -> None:
        """Subscribe to new owners. Without it, a former owner stays valid until its successor's first chunk.

        Only services that `OWN` lists as readers may subscribe.
        """

        async def hear(raw: NatsMsg) -> None:
            self.changed(raw.subject.removeprefix(OWN.live("")))

        await self._bus.client.subscribe(OWN.live("*"), cb=hear)

    def changed(self, session: str) -> None:
        """Note that the session may have another owner. The log is read before the next answer."""
        if (known := self._known.get(session)) is not None:
            known.current, known.heard = False, True

    async def header(self, session: str, entry: Entry, size_bytes: int | None = None) -> ChunkHeader | None:
        """Return the header of a chunk that an owner of `session` wrote.

        Returns None for any other entry, after a call of `on_foreign`. `size_bytes` is the size of the
        payload; None: unknown. Raises UnavailableError.
        """
        header, proven = self.known_header(session, entry, size_bytes)
        if header is None or proven or (await self._read(session)).has_written(header, entry.sequence):
            return header
        self._foreign(session, entry, f"{header.worker} is not its owner at epoch {header.epoch}")
        return None

    def known_header(
        self, session: str, entry: Entry, size_bytes: int | None = None
    ) -> tuple[ChunkHeader | None, bool]:
        """Return the header in `entry` (None: foreign), and whether it is proven: if not, ask `header`."""
        try:
            header = ChunkHeader.of_entry(session, entry.headers, size_bytes)
        except InvalidInputError as error:
            self._foreign(session, entry, error.detail)
            return None, False
        identity = CHUNK.identity(entry.subject)
        if identity not in (None, identity_of(header.worker)):
            self._foreign(session, entry, f"{identity} is not the identity of {header.worker}")
            return None, False
        known = self._known.get(session)
        return header, known is not None and known.current and known.has_written(header, entry.sequence)

    async def has_owned(self, session: str, epoch: int, worker: str) -> bool:
        """Whether `worker` owned `session` at `epoch`, now or before. Raises UnavailableError."""
        known = self._known.get(session)
        if known is None or not known.names(epoch, worker):
            known = await self._read(session)
        return known.names(epoch, worker)

    async def strangers(self, session: str, identities: set[str]) -> set[str]:
        """Return those of `identities` that never owned `session`.

        Returns no identity if the log does not have all owners of the session. Raises UnavailableError.
        """
        known = self._known.get(session)
        if known is None or identities - known.identities:
            known = await self._read(session)
        return identities - known.identities if known.complete else set()

    async def newest(self, session: str) -> Found | None:
        """Return the newest chunk of `session` that an owner wrote, or None. Raises UnavailableError."""
        entry = await last_entry(self._bus, CHUNKS, CHUNK.of(session))
        entry = entry or await last_entry(self._bus, CHUNKS, CHUNK_UNNAMED.of(session))
        if entry is None:
            return None
        header = await self.header(session, entry, len(entry.data))
        return (header, entry) if header else await self._newest_of_owners(session)

    async def first(self, session: str, sequence: int) -> Found | None:
        """Return the first chunk from stream `sequence` on that an owner wrote. Raises UnavailableError."""
        if (found := await self.first_unnamed(session, sequence)) is not None:
            return found
        while (entry := await next_entry(self._bus, CHUNKS, CHUNK.of(session), sequence)) is not None:
            if (header := await self.header(session, entry, len(entry.data))) is not None:
                return header, entry
            sequence = entry.sequence + 1
            history = await self._read(session)
            if history.entries and history.entries[0].sequence < sequence:
                # Many more foreign entries may follow: from here on, read only the subjects of owners.
                return await self._first_of_owners(session, history, sequence)
        return None

    async def first_unnamed(self, session: str, sequence: int) -> Found | None:
        """As `first`, for chunks from earlier versions, which precede all others."""
        history = self._known.get(session) or await self._read(session)
        if sequence > history.unnamed_until:
            return None
        return await self._search.first(session, CHUNK_UNNAMED.of(session), sequence, None)

    async def oldest(self, session: str) -> Found | None:
        """Return the first chunk that an owner wrote and after which no chunk is missing.

        With several identities, the broker may have dropped chunks of one that are newer than chunks of
        another. Raises UnavailableError.
        """
        found = await self.first(session, 1)
        history = self._known.get(session) or await self._read(session)
        if found is None or len(history.identities) + bool(history.unnamed_until) < 2:
            return found
        async for stint in self.stints(session):
            found = stint
        return found

    async def stints(self, session: str) -> AsyncGenerator[Found]:
        """Yield the first chunk that the log has of each owner, newest owner first.

        Ends with the first owner of which an earlier chunk is lost. Raises UnavailableError.
        """
        history = await self._read(session)
        for own, end in reversed(history.stints()):
            for subject in history.subjects(session, own):
                found = await self._search.first(session, subject, own.sequence + 1, end)
                if found is None:
                    continue
                yield found
                header, _ = found
                if header.began is not None and header.index > header.began:
                    return
                break

    async def _first_of_owners(self, session: str, history: History, sequence: int) -> Found | None:
        for own, end in history.stints():
            if end is None or end > sequence:
                start = max(sequence, own.sequence + 1)
                assert own.worker is not None
                found = await self._search.first(session, CHUNK.by(session, own.worker), start, end)
                if found is not None:
                    return found
        return None

    async def _newest_of_owners(self, session: str) -> Found | None:
        history = await self._read(session)
        for own, end in reversed(history.stints()):
            for subject in reversed(history.subjects(session, own)):
                last = await last_entry(self._bus, CHUNKS, subject)
                if last is None or last.sequence < own.sequence:
                    continue
                before = last.sequence + 1 if end is None else min(end, last.sequence + 1)
                if (found := await self._search.newest(session, subject, own.sequence, before)) is not None:
                    return found
        return None

    async def _read(self, session: str) -> History:
        """Read the entries after the newest known one, or all if the log no longer has the known one."""
        known = self._known.get(session)
        if known is None:
            unnamed = await last_entry(self._bus, CHUNKS, CHUNK_UNNAMED.of(session))
            known = History([], unnamed.sequence if unnamed is not None else 0)
        last = known.entries[-1] if known.entries else None
        history = self._known[session] = History(list(known.entries), known.unnamed_until)
        if last is not None and await self._next(session, last.sequence) != last:
            history.entries.clear()
            history.unnamed_until = 0
        position = history.entries[-1].sequence + 1 if history.entries else 1
        while (own := await self._next(session, position)) is not None:
            history.entries.append(own)
            position = own.sequence + 1
        # An owner that was announced during the reading may be missing.
        history.current = not history.heard
        return history

    async def _next(self, session: str, sequence: int) -> Owned | None:
        entry = await next_entry(self._bus, CHUNKS, OWN.of(session), sequence)
        if entry is None:
            return None
        try:
            own = Ownership.from_bytes(entry.data)
        except SchemaVersionError as error:
            if error.newer:
                # Only the state store may write here, and this process cannot know who the owner is.
                refusal = IncompatibleVersionError(f"{entry.subject}: {error}", field=MEMBER)
                self._bus.note_incompatible("state-store", refusal)
                raise refusal from None
            # The chunks of an owner of an earlier MAJOR cannot be read either.
            return Owned(entry.sequence, 0, None)
        except ValidationError:
            # An unreadable entry names no owner.
            return Owned(entry.sequence, 0, None)
        return Owned(entry.sequence, own.epoch, own.worker)

    def _foreign(self, session: str, entry: Entry, reason: str) -> None:
        log.warning("no owner's chunk", session=session, sequence=entry.sequence, reason=reason)
        self._on_foreign()
