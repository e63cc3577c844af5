"""Session events and worker events. For each session and each worker, they have the order of the commits.

Only the state store publishes events, through an outbox: an event is in the log if and only if its change was
committed. Every event carries the row as it was right after the change.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from turboserve.contracts import versions
from turboserve.contracts.base import Contract, Id, Note, Number, Text, UnixSeconds
from turboserve.contracts.control_declarations import ControlName
from turboserve.contracts.controls import ControlValue
from turboserve.contracts.sessions import SessionRecord, WeightsDigest
from turboserve.contracts.workers import WorkerRecord


class _Event(Contract):
    id: Id
    """Unique id. It is also the message id, which makes the publication idempotent."""
    at: UnixSeconds


class _SessionEvent(_Event):
    record: SessionRecord
    """The row after the change. `record.event_sequence` is the number of this event."""


class SessionCreated(_SessionEvent):
    """A user created a session. The scheduler places it next."""

    type: Literal["session.created"] = "session.created"


class SessionPlaced(_SessionEvent):
    """A worker owns the session under a new epoch: first placement, resumption, recovery or rebuild."""

    type: Literal["session.placed"] = "session.placed"
    kind: Text
    previous_worker: Id | None = None
    previous_weights: WeightsDigest | None = None
    """Digest of the weights that generated the chunks so far, if the new worker has other weights. The
    session then continues from its latents, and may look different from here on."""


class SessionMigrating(_SessionEvent):
    """A migration to `record.target` begins. Until its commit, the source runs (or keeps) the session."""

    type: Literal["session.migrating"] = "session.migrating"
    reason: Note


class SessionMigrated(_SessionEvent):
    """A migration is committed: the target has the state and owns the session under a new epoch."""

    type: Literal["session.migrated"] = "session.migrated"
    previous_worker: Id | None = None


class SessionMigrationAbandoned(_SessionEvent):
    """The migration to `target` is abandoned. The session stays at its worker."""

    type: Literal["session.migration_abandoned"] = "session.migration_abandoned"
    target: Id
    reason: Note


class SessionSuspended(_SessionEvent):
    """The session is suspended and has no slot. Its state is in host memory, or rebuilt from latents."""

    type: Literal["session.suspended"] = "session.suspended"


class SessionResumeRequested(_SessionEvent):
    """The user resumes the session, or a viewer returns. The scheduler places the session again."""

    type: Literal["session.resume_requested"] = "session.resume_requested"


class SessionChanged(_SessionEvent):
    """The user changed the session's `quality` or `max_lead_s`."""

    type: Literal["session.changed"] = "session.changed"


class SessionEnded(_SessionEvent):
    """The session was terminated or failed. `record.reason` says why."""

    type: Literal["session.ended"] = "session.ended"


class _PromptEvent(_SessionEvent):
    prompt_id: Id
    control_seq: Number
    prompt: Text


class PromptAccepted(_PromptEvent):
    """The prompt is committed. A later chunk will show it."""

    type: Literal["prompt.accepted"] = "prompt.accepted"


class PromptApplied(_PromptEvent):
    """The first chunk that shows the prompt is in the log."""

    type: Literal["prompt.applied"] = "prompt.applied"
    chunk_index: Number


class PromptSuperseded(_PromptEvent):
    """A later prompt took effect first: no chunk shows this prompt."""

    type: Literal["prompt.superseded"] = "prompt.superseded"
    superseded_by: Id
    """`prompt_id` of the prompt that took effect instead."""


class _ControlEvent(_SessionEvent):
    control_id: Id
    control_seq: Number
    name: ControlName
    value: ControlValue = None


class ControlAccepted(_ControlEvent):
    """The control's value is committed. A later chunk will show it."""

    type: Literal["control.accepted"] = "control.accepted"


class ControlApplied(_ControlEvent):
    """The first chunk that shows the value is in the log."""

    type: Literal["control.applied"] = "control.applied"
    chunk_index: Number


class ControlSuperseded(_ControlEvent):
    """A later value of the same control took effect first: no chunk shows this value."""

    type: Literal["control.superseded"] = "control.superseded"
    superseded_by: Id
    """`control_id` of the value that took effect instead."""


SessionEvent = (
    SessionCreated
    | SessionPlaced
    | SessionMigrating
    | SessionMigrated
    | SessionMigrationAbandoned
    | SessionSuspended
    | SessionResumeRequested
    | SessionChanged
    | SessionEnded
    | PromptAccepted
    | PromptApplied
    | PromptSuperseded
    | ControlAccepted
    | ControlApplied
    | ControlSuperseded
)


class WorkerJoined(_Event):
    """A worker has renewed for the first time."""

    type: Literal["worker.joined"] = "worker.joined"
    worker: WorkerRecord


class WorkerLeft(_Event):
    """A worker was declared gone. Its sessions need another worker."""

    type: Literal["worker.left"] = "worker.left"
    worker: WorkerRecord


WorkerEvent = WorkerJoined | WorkerLeft
Event = SessionEvent | WorkerEvent

_ANY: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])
_OF_SESSION: TypeAdapter[SessionEvent] = TypeAdapter(Annotated[SessionEvent, Field(discriminator="type")])


def event_from_bytes(data: bytes) -> Event:
    """Parse any event.

    A type that this version does not know raises pydantic's ValidationError. Another MAJOR schema version
    raises SchemaVersionError.
    """
    versions.check(data)
    return _ANY.validate_json(data)


def session_event_from_bytes(data: bytes) -> SessionEvent:
    """As `event_from_bytes`, for messages on a session's subject."""
    versions.check(data)
    return _OF_SESSION.validate_json(data)
