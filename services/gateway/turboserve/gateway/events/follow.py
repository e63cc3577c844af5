"""Reads the events of one session from the event log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from turboserve.bus import UNREADABLE, Bus, follow, last_entry, skip
from turboserve.contracts.events import SessionEvent, session_event_from_bytes
from turboserve.subjects import EVENT


class SequencedEvent(NamedTuple):
    """One event, and its sequence in the log."""

    event: SessionEvent
    sequence: int


async def follow_events(
    bus: Bus, session: str, after: int, until: int | None = None
) -> AsyncGenerator[SequencedEvent, None]:
    """Yield the session's events after sequence `after`, until an event shows that the session has ended.

    For a follower that starts earlier, that event is `session.ended`. One more event may follow it in the
    log: for a prompt that the last chunk applied. Event types that this version does not know are skipped,
    and so are events of another MAJOR schema version. `until` is the sequence of the last event of a session
    that has ended, as far as it is known: nothing follows it, even if this version cannot read it.
    """
    entries = follow(bus, EVENT.stream, EVENT.of(session), EVENT.live(session), after_sequence=after)
    async with aclosing(entries):
        async for entry in entries:
            try:
                event = session_event_from_bytes(entry.data)
            except UNREADABLE as error:
                skip(entry.subject, error)
                ended = False
            else:
                yield SequencedEvent(event, entry.sequence)
                ended = event.record.phase.ended
            if ended or (until is not None and entry.sequence >= until):
                return


async def newest_event(bus: Bus, session: str) -> int:
    """Return the sequence of the session's newest event; 0 if there is none."""
    entry = await last_entry(bus, EVENT.stream, EVENT.of(session))
    return 0 if entry is None else entry.sequence
