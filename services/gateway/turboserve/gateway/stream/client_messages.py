"""Messages that a client sends over the WebSocket."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from turboserve.contracts.base import Text
from turboserve.contracts.errors import InvalidInputError
from turboserve.gateway.problems.validation import invalid_input
from turboserve.gateway.public import PublicInput
from turboserve.gateway.sessions.control_schemas import DropBuffer, NewControl
from turboserve.gateway.sessions.schemas import PromptText, SessionChange

MEDIA_LIMIT_S = 1e9
MESSAGE_ID_LIMIT = 64


class _ClientMessage(PublicInput):
    id: Text | None = Field(
        None,
        max_length=MESSAGE_ID_LIMIT,
        description="Chosen by the client. Answers and errors repeat it.",
        examples=["my-1"],
    )


class _Identified(_ClientMessage):
    model_config = ConfigDict(extra="ignore")


_Media = Annotated[float, Field(ge=0, le=MEDIA_LIMIT_S, allow_inf_nan=False)]


class PlayheadReport(_ClientMessage):
    """The playhead of the viewer. The client sends it every `report_interval_s`."""

    type: Literal["playhead"] = Field(description="The type of the message.")
    playhead_s: _Media = Field(description="Media time that is shown now, seconds.", examples=[31.4])
    buffered_s: _Media = Field(
        0.0, description="Media that the viewer can play without another chunk, seconds.", examples=[2.1]
    )


class PromptRequest(_ClientMessage):
    """Change the prompt from the next chunk on. An `id` makes a repeat harmless."""

    type: Literal["prompt"] = Field(description="The type of the message.")
    prompt: PromptText
    drop_buffer: DropBuffer = False


class ControlRequest(_ClientMessage, NewControl):
    """Set a control from the next chunk on. An `id` makes a repeat harmless."""

    type: Literal["control"] = Field(description="The type of the message.")


class ChangeRequest(_ClientMessage, SessionChange):
    """Change the session's limits, from the next chunk on. `session.changed` follows."""

    type: Literal["change"] = Field(description="The type of the message.")


class PauseRequest(_ClientMessage):
    """Pause the session: stop generation, free the slot, keep the state. `session.suspended` follows."""

    type: Literal["pause"] = Field(description="The type of the message.")


class ResumeRequest(_ClientMessage):
    """Continue generation where it stopped. `session.placed` follows once a worker has a free slot."""

    type: Literal["resume"] = Field(description="The type of the message.")


class FirstFrame(_ClientMessage):
    """The client shows the first frame of this connection's video. Sent once; ends the session's trace."""

    type: Literal["first_frame"] = Field(description="The type of the message.")


class Ping(_ClientMessage):
    """Ask for a `pong`."""

    type: Literal["ping"] = Field(description="The type of the message.")


CLIENT_MESSAGES = (
    PlayheadReport,
    PromptRequest,
    ControlRequest,
    ChangeRequest,
    PauseRequest,
    ResumeRequest,
    FirstFrame,
    Ping,
)
"""What the gateway takes."""

CHANGES = (PromptRequest, ControlRequest, ChangeRequest, PauseRequest, ResumeRequest)
"""Messages that need the scope `sessions:write`. The others are part of watching."""


ClientMessage = (
    PlayheadReport
    | PromptRequest
    | ControlRequest
    | ChangeRequest
    | PauseRequest
    | ResumeRequest
    | FirstFrame
    | Ping
)


_CLIENT: TypeAdapter[ClientMessage] = TypeAdapter(Annotated[ClientMessage, Field(discriminator="type")])


_TAGS = ("playhead", "prompt", "control", "change", "pause", "resume", "first_frame", "ping")


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
