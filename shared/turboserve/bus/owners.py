"""Which entries of a session's chunk log its owners wrote.

The fence binds only writers that name it, and every worker may append on a subject of its own identity.
`own.<session>` names the owner at each sequence of the stream. An entry counts if the owner at its place has
the identity in its subject, and is the worker that its header names.

The broker keeps the newest entries of each subject. So an identity's entries make room for its own alone, and
a session that comes back to an identity may lose chunks in the middle: see `Owners.oldest`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable

from nats.aio.msg import Msg as NatsMsg
from pydantic import ValidationError

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.histories import History, Owned
from turboserve.bus.log import Entry, last_entry, next_entry
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import InvalidInputError
from turboserve.subjects import CHUNK, CHUNK_UNNAMED, CHUNKS, OWN, identity_of

log = logs.get("owners")

REMEMBERED = 20_000
"""Sessions whose owners are kept in memory; those of any other are read again when they are needed."""
Found = tuple[ChunkHeader, Entry]
WINDOW = 64
"""Sequences of the stream, of all sessions, that are looked through first for the newest chunk of one."""


class Owners:
    """The owners of sessions, as the log has them. What is not in memory is read from the log.

    `on_foreign` is called for each entry that no owner wrote.
    """

    def __init__(self, bus: Bus, on_foreign: Callable[[], None], remembered: int = REMEMBERED) -> None:
        self._bus, self._on_foreign, self._remembered = bus, on_foreign, remembered
        self._known: OrderedDict[str, History] = OrderedDict()

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
        identity = CHUNK.identity(entry.subject)
        if identity not in (None, identity_of(header.worker)):
            self._foreign(session, entry, f"{identity} is not the identity of {header.worker}")
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

    async def strangers(self, session: str, identities: set[str]) -> set[str]:
        """Those of `identities` that never owned `session`; none if the log does not have all its owners.

        Raises UnavailableError.
        """
        known = self._known.get(session)
        if known is None or identities - known.identities:
            known = await self._read(session)
        return identities - known.identities if known.complete else set()

    async def newest(self, session: str) -> Found | None:
        """The newest chunk of `session` that an owner wrote, or None. Raises UnavailableError."""
        entry = await last_entry(self._bus, CHUNKS, CHUNK.of(session))
        if entry is None:
            entry = await last_entry(self._bus, CHUNKS, CHUNK_UNNAMED.of(session))
        if entry is None:
            return None
        header = await self.header(session, entry, len(entry.data))
        return (header, entry) if header else await self._newest_of_owners(session)

    async def first(self, session: str, sequence: int) -> Found | None:
        """The first chunk at or after stream `sequence` that an owner wrote. Raises UnavailableError."""
        if (found := await self.first_unnamed(session, sequence)) is not None:
            return found
        while (entry := await next_entry(self._bus, CHUNKS, CHUNK.of(session), sequence)) is not None:
            if (header := await self.header(session, entry, len(entry.data))) is not None:
                return header, entry
            sequence = entry.sequence + 1
            history = await self._read(session)
            if history.entries and history.entries[0].sequence < sequence:
                # There may be many more of these: only what owners may have written is read from here on.
                return await self._first_of_owners(session, history, sequence)
        return None

    async def first_unnamed(self, session: str, sequence: int) -> Found | None:
        """As `first`, of the chunks of earlier versions, which come before all others."""
        history = self._known.get(session) or await self._read(session)
        if sequence > history.unnamed_until:
            return None
        return await self._first_on(session, CHUNK_UNNAMED.of(session), sequence, None)

    async def oldest(self, session: str) -> Found | None:
        """The first chunk that an owner wrote and after which no chunk is missing. Raises UnavailableError.

        Of several identities, one may have dropped chunks that come after those which another still has.
        """
        found = await self.first(session, 1)
        history = self._known.get(session) or await self._read(session)
        if found is None or len(history.identities) + bool(history.unnamed_until) < 2:
            return found
        async for stint in self.stints(session):
            found = stint
        return found

    async def stints(self, session: str) -> AsyncGenerator[Found]:
        """The first chunk that the log has of each owner, newest owner first.

        Ends with the first of them that lost an earlier one. Raises UnavailableError.
        """
        history = await self._read(session)
        for own, end in reversed(history.stints()):
            for subject in history.subjects(session, own):
                found = await self._first_on(session, subject, own.sequence + 1, end)
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
                found = await self._first_on(session, CHUNK.by(session, own.worker), start, end)
                if found is not None:
                    return found
        return None

    async def _first_on(self, session: str, subject: str, start: int, end: int | None) -> Found | None:
        """The first chunk of an owner on `subject` from stream sequence `start` on and before `end`."""
        while (entry := await next_entry(self._bus, CHUNKS, subject, start)) is not None:
            if end is not None and entry.sequence >= end:
                break
            if (header := await self.header(session, entry, len(entry.data))) is not None:
                return header, entry
            start = entry.sequence + 1
        return None

    async def _newest_of_owners(self, session: str) -> Found | None:
        history = await self._read(session)
        for own, end in reversed(history.stints()):
            for subject in reversed(history.subjects(session, own)):
                last = await last_entry(self._bus, CHUNKS, subject)
                if last is None or last.sequence < own.sequence:
                    continue
                before = last.sequence + 1 if end is None else min(end, last.sequence + 1)
                if (found := await self._newest_on(session, subject, own.sequence, before)) is not None:
                    return found
        return None

    async def _newest_on(self, session: str, subject: str, after: int, end: int) -> Found | None:
        """The newest chunk of an owner on `subject` after stream sequence `after` and before `end`.

        The broker finds only the first entry from a sequence on: windows before the end are read, each four
        times as wide as the one behind it.
        """
        width, newest = WINDOW, None
        while newest is None and end > after + 1:
            position = start = max(after + 1, end - width)
            while (entry := await next_entry(self._bus, CHUNKS, subject, position)) is not None:
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

    async def _read(self, session: str) -> History:
        """Read what follows the newest entry that is known, or everything if that is no longer there."""
        known = self._known.get(session)
        if known is None:
            unnamed = await last_entry(self._bus, CHUNKS, CHUNK_UNNAMED.of(session))
            known = History([], unnamed.sequence if unnamed is not None else 0)
        last = known.entries[-1] if known.entries else None
        history = self._known[session] = History(list(known.entries), known.unnamed_until)
        self._known.move_to_end(session)
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)
        if last is not None and await self._next(session, last.sequence) != last:
            history.entries.clear()
            history.unnamed_until = 0
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
