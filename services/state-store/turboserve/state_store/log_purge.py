"""Removes parts of the log: finished sessions, the old chunks of long histories, the oldest events."""

from __future__ import annotations

from collections.abc import Iterable

from turboserve.bus import Bus
from turboserve.contracts.base import is_id
from turboserve.subjects import ANY_CHUNK, CHUNK, CHUNK_UNNAMED, CHUNKS, EVENTS, OWN

DEADLINE_S = 3.0


class LogPurge:
    """Removes parts of the log. Calls can be repeated. They raise nats' errors while the broker is away."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def sessions(self, ids: Iterable[str]) -> None:
        """Remove all chunks of these ended sessions, then their fences."""
        jetstream = self._bus.jetstream(DEADLINE_S)
        for session in ids:
            # Without the fence, the broker refuses old owners as well: they name a revision that is gone.
            for log in (CHUNK, CHUNK_UNNAMED):
                await jetstream.purge_stream(CHUNKS, subject=log.of(session))
            await jetstream.purge_stream(CHUNKS, subject=OWN.of(session))

    async def shorten(self, subject: str, keep: int) -> None:
        """Remove all but the newest `keep` chunks of one identity in one session. The fence stays."""
        if keep < 1 or not CHUNK.takes(subject):
            raise ValueError(f"shorten: {subject!r} to {keep}: only chunks, and not to nothing")
        await self._bus.jetstream(DEADLINE_S).purge_stream(CHUNKS, subject=subject, keep=keep)

    async def chunks_before(self, session: str, sequence: int) -> None:
        """Remove all chunks of `session` before stream `sequence`, of every identity."""
        for log in (CHUNK, CHUNK_UNNAMED):
            await self._bus.jetstream(DEADLINE_S).purge_stream(CHUNKS, subject=log.of(session), seq=sequence)

    async def chunks_on(self, subject: str) -> None:
        """Remove all chunks of one identity in one session."""
        if not CHUNK.takes(subject):
            raise ValueError(f"chunks_on: {subject!r} has no chunks")
        await self._bus.jetstream(DEADLINE_S).purge_stream(CHUNKS, subject=subject)

    async def events_before(self, sequence: int) -> None:
        """Remove all events before stream `sequence`."""
        await self._bus.jetstream(DEADLINE_S).purge_stream(EVENTS, seq=sequence)

    async def chunk_counts(self) -> dict[str, dict[str, int]]:
        """Return the number of chunks in the log, by session and subject. Each token of a subject is an id.

        A worker may also append to a subject with a token `*`. As a pattern, it would match other chunks.
        """
        info = await self._bus.jetstream(DEADLINE_S).stream_info(CHUNKS, subjects_filter=ANY_CHUNK)
        sessions: dict[str, dict[str, int]] = {}
        for subject, count in (info.state.subjects or {}).items():
            if all(map(is_id, subject.split("."))):
                sessions.setdefault(CHUNK.token(subject), {})[subject] = count
        return sessions

    async def sessions_in_log(self) -> list[str]:
        """Return the sessions that have chunks or a fence in the log."""
        jetstream = self._bus.jetstream(DEADLINE_S)
        found: set[str] = set()
        for log, subjects in ((CHUNK, ANY_CHUNK), (OWN, OWN.every)):
            info = await jetstream.stream_info(CHUNKS, subjects_filter=subjects)
            found |= {log.token(subject) for subject in info.state.subjects or {}}
        return sorted(session for session in found if is_id(session))
