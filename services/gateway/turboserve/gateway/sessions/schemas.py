"""Schemas of sessions in REST requests and answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from turboserve.contracts.base import ID_PATTERN, Text
from turboserve.contracts.requests import MigrationAccepted
from turboserve.contracts.sessions import (
    METADATA_KEYS_LIMIT,
    METADATA_VALUE_LIMIT,
    PROMPT_LIMIT,
    SEED_LIMIT,
    Activity,
    Decision,
    Phase,
    PromptReceipt,
    SessionRecord,
)
from turboserve.gateway.public import PublicInput, PublicOutput, Timestamp

METADATA_KEY_LIMIT = 64


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


PromptText = Annotated[
    Text,
    Field(min_length=1, max_length=PROMPT_LIMIT, examples=["a red circle moving left"]),
    AfterValidator(_not_blank),
]
_Key = Annotated[Text, Field(min_length=1, max_length=METADATA_KEY_LIMIT)]
_Value = Annotated[Text, Field(max_length=METADATA_VALUE_LIMIT)]


class NewSession(PublicInput):
    prompt: PromptText
    model: Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        None, description="See /v1/models; none: the gateway's default."
    )
    seed: int | None = Field(
        None, ge=0, le=SEED_LIMIT, description="Same model, prompt, seed: same video. None: random."
    )
    metadata: dict[_Key, _Value] = Field({}, max_length=METADATA_KEYS_LIMIT, description="Kept, not read.")


class NewPrompt(PublicInput):
    prompt: PromptText


class NewMigration(PublicInput):
    worker: Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        None, description="See /v1/workers; none: the one that suits best."
    )


class Links(PublicOutput):
    """Paths of the session's resources. `stream` is a WebSocket."""

    self: str
    stream: str
    video: str
    events: str
    prompts: str
    pause: str
    resume: str
    migrate: str
    decisions: str

    @classmethod
    def of(cls, session: str) -> Links:
        base = f"/v1/sessions/{session}"
        return cls(
            self=base,
            stream=f"{base}/stream",
            video=f"{base}/stream.mp4",
            events=f"{base}/events",
            prompts=f"{base}/prompts",
            pause=f"{base}/pause",
            resume=f"{base}/resume",
            migrate=f"{base}/migrate",
            decisions=f"{base}/decisions",
        )


class Session(PublicOutput):
    """One session as its tenant sees it."""

    id: str
    phase: Phase
    activity: Activity
    model: str
    prompt: str = Field(description="The newest accepted prompt.")
    seed: int
    metadata: dict[str, str]
    epoch: int = Field(description="Number of the current ownership; 0 before the first.")
    worker: str | None
    target: str | None = Field(description="Worker to which the session is migrating.")
    next_chunk: int = Field(description="Index of the first chunk not yet made, as far as is known.")
    control_seq: int = Field(description="Number of the newest accepted prompt.")
    applied_control_seq: int = Field(description="Number of the newest prompt that a chunk was made under.")
    playhead_s: float
    reason: str | None = Field(description="Why it ended, or why it waits.")
    created_at: Timestamp
    updated_at: Timestamp
    links: Links

    @classmethod
    def of(cls, record: SessionRecord) -> Session:
        return cls(**record.model_dump(include=set(cls.model_fields)), links=Links.of(record.id))


class SessionList(PublicOutput):
    sessions: list[Session]
    next: str | None = Field(description="Cursor of the next page (`?after=`); none: this is the last.")


class Receipt(PublicOutput):
    """An accepted prompt. The event `prompt.applied` or `prompt.superseded` with this `prompt_id` follows."""

    session: str
    prompt_id: str
    control_seq: int
    accepted_at: Timestamp

    @classmethod
    def of(cls, receipt: PromptReceipt) -> Receipt:
        return cls(**receipt.model_dump(include=set(cls.model_fields)))


class DecisionView(PublicOutput):
    """One decision of the scheduler about the session, with its reason and its numbers."""

    epoch: int
    worker: str | None
    kind: str
    reason: str
    numbers: dict[str, float]
    at: Timestamp

    @classmethod
    def of(cls, decision: Decision) -> DecisionView:
        return cls(**decision.model_dump(include=set(cls.model_fields)))


class DecisionList(PublicOutput):
    decisions: list[DecisionView]


class StartedMigration(PublicOutput):
    """A migration that has begun. The event `session.migrated` or `session.migration_abandoned` ends it."""

    session: str
    epoch: int = Field(description="Unchanged until the migration is committed, then one higher.")
    worker: str | None = Field(description="Worker that runs the session until the migration is committed.")
    target: str | None = Field(description="Where it goes; none: it is there already.")
    migration: int | None = Field(description="Number of this migration among all of the session's.")
    decision: DecisionView

    @classmethod
    def of(cls, accepted: MigrationAccepted) -> StartedMigration:
        record = accepted.record
        return cls(
            session=record.id,
            epoch=record.epoch,
            worker=record.worker,
            target=record.target,
            migration=record.migration,
            decision=DecisionView.of(accepted.decision),
        )
