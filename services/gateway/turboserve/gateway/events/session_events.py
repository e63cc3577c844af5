"""Session events, as they are read from the event log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from pydantic import BaseModel, ValidationError

from turboserve.bus import UNREADABLE, Bus, Entry, follow, last_entry, next_entry, skip
from turboserve.contracts.events import SessionEvent, session_event_from_bytes
from turboserve.contracts.sessions import SessionRecord
from turboserve.subjects import EVENT
from turboserve.tasks import answered


async def follow_events(
    bus: Bus, session: str, after: int, until: int | None = None
) -> AsyncGenerator[SessionEvent, None]:
    """Yield the session's events with numbers above `after`, until one shows that the session has ended.

    Each event comes once and in order. For a follower that starts earlier, the last event is `session.ended`.
    More events may follow it in the log: for prompts that the last chunk settled. They come to a follower
    that starts after it, one at a time. Event types that this version does not know are skipped, and so are
    events of another MAJOR schema version. `until` is the number of the last event of a session that has
    ended, as far as it is known: nothing follows it, even if this version cannot read it.
    """
    place = await answered(partial(_place_after, bus, session, after))
    entries = follow(bus, EVENT.stream, EVENT.of(session), EVENT.live(session), after_sequence=place)
    async with aclosing(entries):
        async for entry in entries:
            # The number, not the place: entries repeat after the broker has lost the end of the stream.
            number = _number(entry)
            if number <= after:
                continue
            after = number
            try:
                event = session_event_from_bytes(entry.data)
            except UNREADABLE as error:
                skip(entry.subject, error)
                ended = False
            else:
                yield event
                ended = event.record.phase.ended
            if ended or (until is not None and number >= until):
                return


async def newest_event(bus: Bus, session: str) -> int:
    """Return the number of the session's newest event in the log; 0 if the log has none."""
    entry = await last_entry(bus, EVENT.stream, EVENT.of(session))
    return 0 if entry is None else _number(entry)


async def known_position(bus: Bus, record: SessionRecord, after: int) -> int:
    """Return `after`, or the number of the session's newest event if that is lower.

    A follower after a number that the session has not reached would wait for it, and not see the session end.
    """
    # The row may be older than the log: it is a remembered one while the state store is not available.
    if after <= record.event_sequence:
        return after
    return min(after, max(record.event_sequence, await newest_event(bus, record.id)))


async def _place_after(bus: Bus, session: str, after: int) -> int:
    """Return a stream sequence that all events up to number `after` have reached, and no later event."""
    if after == 0:
        return 0
    subject = EVENT.of(session)
    newest = await last_entry(bus, EVENT.stream, subject)
    if newest is None:
        return 0
    if _number(newest) <= after:
        return newest.sequence
    low, high = 0, newest.sequence
    while high - low > 1:
        middle = (low + high) // 2
        entry = await next_entry(bus, EVENT.stream, subject, middle)
        if entry is None or _number(entry) > after:
            # There is no event of this session between `middle` and the entry.
            high = middle
        else:
            low = entry.sequence
    return low


class _Row(BaseModel):
    event_sequence: int = 0


class _Numbered(BaseModel):
    """The number in an event of any type. Events of earlier versions have none."""

    record: _Row


def _number(entry: Entry) -> int:
    try:
        return _Numbered.model_validate_json(entry.data).record.event_sequence
    except ValidationError:
        return 0
