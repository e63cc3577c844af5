"""Session events as clients get them: their schemas, and how they are read from the event log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from turboserve.bus import UNREADABLE, Bus, Entry, follow, last_entry, next_entry, skip
from turboserve.contracts import events
from turboserve.contracts.base import Note
from turboserve.contracts.events import SessionEvent, session_event_from_bytes
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.gateway.public import PublicActivity, PublicOutput, Timestamp, activity_of
from turboserve.subjects import EVENT
from turboserve.tasks import answered

_RECORD = {"phase", "activity", "epoch", "worker", "target", "control_seq", "reason"}

PromptId = Annotated[
    str, Field(description="The `prompt_id` of the prompt's receipt.", examples=["prm_5f3a9c"])
]
Prompt = Annotated[str, Field(description="The text of the prompt.", examples=["a blue square"])]


class EventBase(PublicOutput):
    """The members of every event: the event, and the session right after it."""

    type: str = Field(description="The type of the event.")
    sequence: int = Field(description="Number of the event in the session: 1, 2, 3, …", examples=[4])
    id: str = Field(description="Id of the event, the same in every stream.", examples=["ev_0f4c2b9d"])
    at: Timestamp = Field(description="When it happened.")
    phase: Phase = Field(description="The session's phase.", examples=["active"])
    activity: PublicActivity = Field(description="What the user wants of the session.", examples=["watching"])
    epoch: int = Field(description="Number of the session's current ownership.", examples=[1])
    worker: str | None = Field(description="The worker that owns the session.", examples=["wk_5f3a9c"])
    target: str | None = Field(
        description="The worker that the session is migrating to.", examples=["wk_77d1e0"]
    )
    control_seq: int = Field(description="Number of the newest accepted prompt.", examples=[1])

    def text(self) -> str:
        """Return the event as JSON, without the members that are null."""
        return self.model_dump_json(exclude_none=True)


class SessionCreatedEvent(EventBase):
    """The session was created and waits for a worker."""

    type: Literal["session.created"] = Field(default="session.created", description="The type of the event.")


class SessionPlacedEvent(EventBase):
    """A worker owns the session under a new epoch."""

    type: Literal["session.placed"] = Field(default="session.placed", description="The type of the event.")
    kind: str = Field(
        description="Why: `place` (first placement), `resume` (after a suspension), `recover` (its worker "
        "was lost), `rebuild` (its worker drains, and no other worker has the same weights).",
        examples=["place"],
    )
    previous_worker: str | None = Field(description="The owner before.", examples=["wk_2b8e41"])
    previous_weights: str | None = Field(
        description="Digest of the weights that generated the video so far, if the new worker has others. "
        "The video may look different from here on.",
        examples=["b2a1c3"],
    )


class SessionMigratingEvent(EventBase):
    """A migration to `target` has begun. The video continues."""

    type: Literal["session.migrating"] = Field(
        default="session.migrating", description="The type of the event."
    )
    reason: Note = Field(description="Why the session migrates.", examples=["wk_77d1e0 is less loaded"])


class SessionMigratedEvent(EventBase):
    """The migration is committed, under the next epoch."""

    type: Literal["session.migrated"] = Field(
        default="session.migrated", description="The type of the event."
    )
    previous_worker: str | None = Field(description="The owner before.", examples=["wk_2b8e41"])


class SessionMigrationAbandonedEvent(EventBase):
    """The session stays on its worker and does not migrate to `target`."""

    type: Literal["session.migration_abandoned"] = Field(
        default="session.migration_abandoned", description="The type of the event."
    )
    reason: Note = Field(description="Why the session stays.", examples=["the target is gone"])


class SessionSuspendedEvent(EventBase):
    """No video is generated. `activity` is `paused` or `idle` (no viewer for a while)."""

    type: Literal["session.suspended"] = Field(
        default="session.suspended", description="The type of the event."
    )


class SessionResumeRequestedEvent(EventBase):
    """The session shall run again, and waits for a worker."""

    type: Literal["session.resume_requested"] = Field(
        default="session.resume_requested", description="The type of the event."
    )


class SessionChangedEvent(EventBase):
    """The limits of the session's quality or lead were changed. The session itself has them."""

    type: Literal["session.changed"] = Field(default="session.changed", description="The type of the event.")


class SessionEndedEvent(EventBase):
    """The session has ended. `phase` is `terminated` or `failed`."""

    type: Literal["session.ended"] = Field(default="session.ended", description="The type of the event.")
    reason: Note | None = Field(description="Why the session ended.", examples=["ended by its user"])


class PromptAcceptedEvent(EventBase):
    """A prompt is stored. `prompt.applied` or `prompt.superseded` follows."""

    type: Literal["prompt.accepted"] = Field(default="prompt.accepted", description="The type of the event.")
    prompt_id: PromptId
    prompt: Prompt


class PromptAppliedEvent(EventBase):
    """The video shows the prompt."""

    type: Literal["prompt.applied"] = Field(default="prompt.applied", description="The type of the event.")
    prompt_id: PromptId
    prompt: Prompt
    chunk_index: int = Field(description="Index of the first chunk generated under the prompt.", examples=[5])


class PromptSupersededEvent(EventBase):
    """A later prompt took effect first: no chunk shows this prompt."""

    type: Literal["prompt.superseded"] = Field(
        default="prompt.superseded", description="The type of the event."
    )
    prompt_id: PromptId
    prompt: Prompt
    superseded_by: str = Field(
        description="`prompt_id` of the prompt that took effect instead.", examples=["prm_8c1d20"]
    )


SCHEMAS: dict[type[events.SessionEvent], type[EventBase]] = {
    events.SessionCreated: SessionCreatedEvent,
    events.SessionPlaced: SessionPlacedEvent,
    events.SessionMigrating: SessionMigratingEvent,
    events.SessionMigrated: SessionMigratedEvent,
    events.SessionMigrationAbandoned: SessionMigrationAbandonedEvent,
    events.SessionSuspended: SessionSuspendedEvent,
    events.SessionResumeRequested: SessionResumeRequestedEvent,
    events.SessionChanged: SessionChangedEvent,
    events.SessionEnded: SessionEndedEvent,
    events.PromptAccepted: PromptAcceptedEvent,
    events.PromptApplied: PromptAppliedEvent,
    events.PromptSuperseded: PromptSupersededEvent,
}
"""Event in the log → its schema for clients."""


def public_event(event: events.SessionEvent) -> EventBase:
    """Return the event as clients get it."""
    record = event.record
    own = event.model_dump(exclude={"record"})
    row = record.model_dump(include=_RECORD) | {"activity": activity_of(record)}
    return SCHEMAS[type(event)].model_validate({**row, **own, "sequence": record.event_sequence})


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
