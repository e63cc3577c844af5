"""Messages of the WebSocket. Video is binary: each binary message follows the JSON that announces it."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from turboserve.contracts.base import Text
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.events import (
    PromptAccepted,
    PromptApplied,
    PromptSuperseded,
    SessionEnded,
    SessionEvent,
    SessionMigrated,
    SessionMigrating,
    SessionMigrationAbandoned,
    SessionPlaced,
)
from turboserve.contracts.sessions import Activity, Phase
from turboserve.gateway.problems.schemas import Problem
from turboserve.gateway.problems.validation import invalid_input
from turboserve.gateway.public import Timestamp, timestamp
from turboserve.gateway.sessions.schemas import PromptText

VERSION = 1
MEDIA_LIMIT_S = 1e9


class _ServerMessage(BaseModel):
    model_config = ConfigDict(frozen=True)

    def text(self) -> str:
        return self.model_dump_json(exclude_none=True)


class Hello(_ServerMessage):
    """First message: the state of the session, and where this stream begins."""

    type: Literal["hello"] = "hello"
    protocol_version: int
    """Version of this protocol. A change that breaks clients raises it."""
    session: str
    phase: Phase
    activity: Activity
    prompt: str
    model: str
    seed: int
    epoch: int
    worker: str | None
    target: str | None
    """The worker that the session is migrating to."""
    control_seq: int
    applied_control_seq: int
    next: int
    """Index of the first chunk of this stream."""
    start_s: float
    """Media time of the first frame of this stream, seconds."""
    events_after: int
    """The stream sends the events with a greater `sequence`."""
    newest_event: int
    """Events up to this `sequence` are history: this message shows what they changed."""
    max_message_bytes: int
    report_interval_s: float
    """Interval at which the client should report its playhead, seconds."""


class Init(_ServerMessage):
    """Announces an init segment: the first, and every change. One binary message follows."""

    type: Literal["init"] = "init"
    mime: str
    bytes: int
    width: int
    height: int
    fps: float


class ChunkMessage(_ServerMessage):
    """Announces a chunk. One binary message follows: one closed fMP4 fragment."""

    type: Literal["chunk"] = "chunk"
    index: int
    epoch: int
    worker: str
    start_s: float
    duration_s: float
    control_seq: int
    compute_s: float
    published_at: Timestamp
    bytes: int

    @classmethod
    def of(cls, header: ChunkHeader, size: int) -> ChunkMessage:
        return cls(
            index=header.index,
            epoch=header.epoch,
            worker=header.worker,
            start_s=header.start_s,
            duration_s=header.frames / header.fps,
            control_seq=header.control_seq,
            compute_s=header.compute_s,
            published_at=timestamp(header.published_at),
            bytes=size,
        )


class EventMessage(_ServerMessage):
    """An event of the session. `type` is the type of the event: session.placed, prompt.applied, …"""

    type: str
    sequence: int
    """Number of the event among those of the session: 1, 2, 3, …"""
    id: str
    at: Timestamp
    phase: Phase
    activity: Activity
    epoch: int
    worker: str | None
    control_seq: int
    reason: str | None = None
    """session.migrating, session.migration_abandoned and session.ended: the reason of the event."""
    kind: str | None = None
    """session.placed: the kind of decision: place, resume or recover."""
    previous_worker: str | None = None
    """session.placed and session.migrated: the owner before the event."""
    target: str | None = None
    """The target of the migration; session.migration_abandoned: of the abandoned migration."""
    prompt_id: str | None = None
    """prompt.accepted, prompt.applied and prompt.superseded: the id in the receipt."""
    prompt: str | None = None
    chunk_index: int | None = None
    """prompt.applied: the first chunk made with the prompt."""
    superseded_by: str | None = None
    """prompt.superseded: `prompt_id` of the prompt that took effect instead."""

    @classmethod
    def of(cls, event: SessionEvent) -> EventMessage:
        record = event.record
        more: dict[str, object] = {}
        if isinstance(event, PromptAccepted | PromptApplied | PromptSuperseded):
            more = {"prompt_id": event.prompt_id, "prompt": event.prompt, "control_seq": event.control_seq}
        if isinstance(event, PromptApplied):
            more["chunk_index"] = event.chunk_index
        if isinstance(event, PromptSuperseded):
            more["superseded_by"] = event.superseded_by
        if isinstance(event, SessionPlaced):
            more = {"kind": event.kind, "previous_worker": event.previous_worker}
        if isinstance(event, SessionMigrated):
            more = {"previous_worker": event.previous_worker}
        if isinstance(event, SessionMigrating):
            more = {"reason": event.reason}
        if isinstance(event, SessionMigrationAbandoned):
            more = {"reason": event.reason, "target": event.target}
        if isinstance(event, SessionEnded):
            more = {"reason": record.reason}
        return cls.model_validate(
            {
                "type": event.type,
                "sequence": record.event_sequence,
                "id": event.id,
                "at": event.at,
                "phase": record.phase,
                "activity": record.activity,
                "epoch": record.epoch,
                "worker": record.worker,
                "target": record.target,
                "control_seq": record.control_seq,
                **more,
            }
        )


class ReceiptMessage(_ServerMessage):
    """Answer to the client's `prompt`: the prompt is accepted."""

    type: Literal["receipt"] = "receipt"
    id: str | None
    """The client's own id, if it gave one."""
    prompt_id: str
    control_seq: int
    accepted_at: Timestamp


class Pong(_ServerMessage):
    type: Literal["pong"] = "pong"
    id: str | None = None


class End(_ServerMessage):
    """Last message: the session has ended and all its video was sent. Then the socket closes with 1000."""

    type: Literal["end"] = "end"
    phase: Phase
    reason: str | None
    last: int
    """Index of the last chunk; -1: there was none."""


class ErrorMessage(Problem):
    """A problem, as REST would answer it. `id` is the id of the message that caused it, if it had one."""

    type: Literal["error"] = "error"
    id: str | None = None

    @classmethod
    def of_problem(cls, problem: Problem, message_id: str | None = None) -> ErrorMessage:
        return cls(**problem.model_dump(exclude={"type"}), id=message_id)

    def text(self) -> str:
        return self.model_dump_json(exclude_none=True)


class _ClientMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Text | None = Field(None, max_length=64)


_Media = Annotated[float, Field(ge=0, le=MEDIA_LIMIT_S, allow_inf_nan=False)]


class _Identified(_ClientMessage):
    model_config = ConfigDict(extra="ignore", strict=True)


class PlayheadReport(_ClientMessage):
    """The playhead of the viewer. The client sends it several times a second."""

    type: Literal["playhead"]
    playhead_s: _Media
    buffered_s: _Media = 0.0
    """Media that the viewer can play without another chunk, seconds."""


class PromptRequest(_ClientMessage):
    type: Literal["prompt"]
    prompt: PromptText


class PauseRequest(_ClientMessage):
    type: Literal["pause"]


class ResumeRequest(_ClientMessage):
    type: Literal["resume"]


class FirstFrame(_ClientMessage):
    """The client shows the first frame of this connection's video. Sent once; ends the session's trace."""

    type: Literal["first_frame"]


class Ping(_ClientMessage):
    type: Literal["ping"]


ClientMessage = PlayheadReport | PromptRequest | PauseRequest | ResumeRequest | FirstFrame | Ping
_CLIENT: TypeAdapter[ClientMessage] = TypeAdapter(Annotated[ClientMessage, Field(discriminator="type")])
_TAGS = ("playhead", "prompt", "pause", "resume", "first_frame", "ping")


def read_message(text: str | None, limit_bytes: int) -> ClientMessage:
    """Parse a client's message.

    Raises MalformedRequestError if it is not JSON, otherwise InvalidInputError that names fields and limits.
    """
    if text is None:
        raise InvalidInputError("binary messages are not taken here", field="message", limit="text")
    if len(text) > limit_bytes or len(text.encode(errors="replace")) > limit_bytes:
        raise InvalidInputError(
            f"the message is over {limit_bytes} bytes", field="message", limit=limit_bytes
        )
    try:
        return _validated(text)
    except ValidationError as error:
        raise invalid_input(error.errors(), skip=_TAGS, whole="message") from None


def message_id(text: str | None, limit_bytes: int) -> str | None:
    """Return the `id` of a message that `read_message` has refused; None if it has no valid one."""
    if text is None or len(text) > limit_bytes:
        return None
    try:
        return _Identified.model_validate(json.loads(text)).id
    except (ValueError, RecursionError):
        return None


def _validated(text: str) -> ClientMessage:
    """Validate a client's message. Raises ValidationError."""
    try:
        return _CLIENT.validate_json(text)
    except ValidationError:
        # pydantic takes a lone surrogate for invalid JSON and names no field. Python's parser accepts it.
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return _CLIENT.validate_python(value)
        raise
