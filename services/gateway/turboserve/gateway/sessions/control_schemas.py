"""Schemas of prompts and typed controls in REST requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field

from turboserve.contracts.control_declarations import NAME_PATTERN, ControlDeclaration
from turboserve.contracts.controls import bounded
from turboserve.contracts.sessions import ControlReceipt as AcceptedControl
from turboserve.contracts.sessions import PromptReceipt
from turboserve.gateway.public import PublicInput, PublicOutput, Timestamp
from turboserve.gateway.sessions.schemas import PromptText, SessionId

ControlNameInput = Annotated[
    str,
    Field(
        pattern=NAME_PATTERN,
        description="Name of the control, one of those of the session's model in `/v1/models`.",
        examples=["steer"],
    ),
]
ControlValueInput = Annotated[
    Any,
    AfterValidator(bounded),
    Field(
        description="A value that the control's schema allows. `null`: the model's own, as if never set.",
        examples=["left"],
    ),
]
DropBuffer = Annotated[
    bool,
    Field(
        description="Whether viewers discard the video that they have not shown yet, and skip to the first "
        "chunk that shows it. The session's video stays as it is.",
        examples=[False],
    ),
]


class NewPrompt(PublicInput):
    """A prompt for a session that has begun."""

    prompt: PromptText
    drop_buffer: DropBuffer = False


class NewControl(PublicInput):
    """A control's value for a session that has begun."""

    name: ControlNameInput
    value: ControlValueInput = None
    drop_buffer: DropBuffer = False


class ControlReceipt(PublicOutput):
    """An accepted value. The event `control.applied` or `control.superseded` with this id follows."""

    session: SessionId
    control_id: str = Field(
        description="Id of the value. Its events carry the same id.", examples=["ctl_5f3a9c"]
    )
    control_seq: int = Field(
        description="Number of the value among the session's prompts and controls. Chunks carry the number "
        "of the newest one that they show.",
        examples=[2],
    )
    accepted_at: Timestamp = Field(description="When the value was stored.")

    @classmethod
    def of(cls, receipt: AcceptedControl) -> Self:
        return cls(**receipt.model_dump(include=set(cls.model_fields)))


class ModelControl(PublicOutput):
    """A control that a model takes beside a prompt."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = Field(description="Name of the control.", examples=["steer"])
    description: str = Field(
        description="What the control does.", examples=["Where the figure moves from its place."]
    )
    value_schema: dict[str, Any] = Field(
        alias="schema",
        description="JSON schema (draft 2020-12) of a value.",
        examples=[{"type": "string", "enum": ["left", "right", "stop"]}],
    )

    fixed: bool = Field(
        description="Whether the value is set when a session is created (`controls`), and never again.",
        examples=[False],
    )

    @classmethod
    def of(cls, declared: ControlDeclaration) -> Self:
        return cls(**declared.model_dump())


class Receipt(PublicOutput):
    """An accepted prompt. The event `prompt.applied` or `prompt.superseded` with this `prompt_id` follows."""

    session: SessionId
    prompt_id: str = Field(
        description="Id of the prompt. Its events carry the same id.", examples=["prm_5f3a9c"]
    )
    control_seq: int = Field(
        description="Number of the prompt in the session. Chunks carry the number of their prompt.",
        examples=[1],
    )
    accepted_at: Timestamp = Field(description="When the prompt was stored.")

    @classmethod
    def of(cls, receipt: PromptReceipt) -> Self:
        return cls(**receipt.model_dump(include=set(cls.model_fields)))
