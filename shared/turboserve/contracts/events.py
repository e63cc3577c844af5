"""Session and worker events: what happened, for each session and each worker in the order of the commits.

Only the state store publishes them, through an outbox: an event is in the log if and only if its change was
committed. Every event carries the row as it was right after.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from turboserve.contracts.base import Contract, Id, Note, Number, Text, UnixSeconds
from turboserve.contracts.sessions import SessionRecord, WeightsDigest
from turboserve.contracts.workers import WorkerRecord


class _Event(Contract):
    id: Id
    """Unique; also the message id that makes the publication idempotent."""
    at: UnixSeconds


class _SessionEvent(_Event):
    record: SessionRecord


class SessionCreated(_SessionEvent):
    """Someone asks for video; the scheduler places it."""

    type: Literal["session.created"] = "session.created"


class SessionPlaced(_SessionEvent):
    """A worker owns it under a new epoch: first placement, resumption, recovery or rebuild."""

    type: Literal["session.placed"] = "session.placed"
    kind: Text
    previous_worker: Id | None = None
    previous_weights: WeightsDigest | None = None
    """Weights of its chunks so far, where the worker has others: it goes on from its latents, and may look
    different from here on."""


class SessionMigrating(_SessionEvent):
    """It is to move to `record.target`; until it is there it goes on where it is (or stays suspended)."""

    type: Literal["session.migrating"] = "session.migrating"
    reason: Note


class SessionMoved(_SessionEvent):
    """Its state is at another worker, which owns it under a new epoch."""

    type: Literal["session.moved"] = "session.moved"
    previous_worker: Id | None = None


class SessionMoveAbandoned(_SessionEvent):
    """It stays where it is, and does not go to `target`."""

    type: Literal["session.move_abandoned"] = "session.move_abandoned"
    target: Id
    reason: Note


class SessionSuspended(_SessionEvent):
    """Paused, or nobody watches: its slot is free, its state is in host memory."""

    type: Literal["session.suspended"] = "session.suspended"


class SessionResumeRequested(_SessionEvent):
    """The user is back; the scheduler places it again."""

    type: Literal["session.resume_requested"] = "session.resume_requested"


class SessionEnded(_SessionEvent):
    """Terminated by its user, or failed; `record.reason` says why."""

    type: Literal["session.ended"] = "session.ended"


class PromptAccepted(_SessionEvent):
    """The prompt is committed. A later chunk is made under it."""

    type: Literal["prompt.accepted"] = "prompt.accepted"
    event_id: Id
    control_seq: Number
    prompt: Text


class PromptApplied(_SessionEvent):
    """The first chunk made under the prompt is in the log."""

    type: Literal["prompt.applied"] = "prompt.applied"
    event_id: Id
    control_seq: Number
    prompt: Text
    chunk_index: Number


SessionEvent = (
    SessionCreated
    | SessionPlaced
    | SessionMigrating
    | SessionMoved
    | SessionMoveAbandoned
    | SessionSuspended
    | SessionResumeRequested
    | SessionEnded
    | PromptAccepted
    | PromptApplied
)


class WorkerJoined(_Event):
    """A worker renewed for the first time."""

    type: Literal["worker.joined"] = "worker.joined"
    worker: WorkerRecord


class WorkerLeft(_Event):
    """A worker was declared gone; its sessions need another."""

    type: Literal["worker.left"] = "worker.left"
    worker: WorkerRecord


WorkerEvent = WorkerJoined | WorkerLeft
Event = SessionEvent | WorkerEvent

_ANY: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])
_OF_SESSION: TypeAdapter[SessionEvent] = TypeAdapter(Annotated[SessionEvent, Field(discriminator="type")])


def event_from_bytes(data: bytes) -> Event:
    """Read any event; a type that this version does not know raises pydantic's ValidationError."""
    return _ANY.validate_json(data)


def session_event_from_bytes(data: bytes) -> SessionEvent:
    """As `event_from_bytes`, of what stands on a session's subject."""
    return _OF_SESSION.validate_json(data)
