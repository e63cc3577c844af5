"""Session events as clients get them: by the gateway's streams, and by webhooks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from turboserve.contracts import events
from turboserve.contracts.base import Note
from turboserve.contracts.public_types import PublicActivity, PublicMessage, Timestamp, activity_of
from turboserve.contracts.sessions import Phase

_OF_THE_RECORD = {"phase", "activity", "epoch", "worker", "target", "control_seq", "reason"}

PromptId = Annotated[
    str, Field(description="The `prompt_id` of the prompt's receipt.", examples=["prm_5f3a9c"])
]
Prompt = Annotated[str, Field(description="The text of the prompt.", examples=["a blue square"])]


class EventBase(PublicMessage):
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
    control_seq: int = Field(description="Number of the newest accepted prompt or control.", examples=[1])


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


class _PublicControlEvent(EventBase):
    control_id: Annotated[
        str, Field(description="The `control_id` of the value's receipt.", examples=["ctl_5f3a9c"])
    ]
    name: str = Field(description="Name of the control.", examples=["steer"])
    value: Any = Field(None, description="The value. `null`: the model's own.", examples=["left"])


class ControlAcceptedEvent(_PublicControlEvent):
    """A control's value is stored. `control.applied` or `control.superseded` follows."""

    type: Literal["control.accepted"] = Field(
        default="control.accepted", description="The type of the event."
    )


class ControlAppliedEvent(_PublicControlEvent):
    """The video shows the value."""

    type: Literal["control.applied"] = Field(default="control.applied", description="The type of the event.")
    chunk_index: int = Field(description="Index of the first chunk generated under the value.", examples=[5])


class ControlSupersededEvent(_PublicControlEvent):
    """A later value of the same control took effect first: no chunk shows this value."""

    type: Literal["control.superseded"] = Field(
        default="control.superseded", description="The type of the event."
    )
    superseded_by: str = Field(
        description="`control_id` of the value that took effect instead.", examples=["ctl_8c1d20"]
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
    events.ControlAccepted: ControlAcceptedEvent,
    events.ControlApplied: ControlAppliedEvent,
    events.ControlSuperseded: ControlSupersededEvent,
}
"""Event in the log → its schema for clients."""


def public_event(event: events.SessionEvent) -> EventBase:
    """Return the event as clients get it."""
    record = event.record
    own = event.model_dump(exclude={"record"})
    row = record.model_dump(include=_OF_THE_RECORD) | {"activity": activity_of(record)}
    return SCHEMAS[type(event)].model_validate({**row, **own, "sequence": record.event_sequence})
