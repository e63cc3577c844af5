"""Schemas of a session's migrations, and of the scheduler's decisions, in REST requests and answers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from turboserve.contracts.base import ID_PATTERN
from turboserve.contracts.requests import MigrationAccepted
from turboserve.contracts.sessions import Decision
from turboserve.gateway.public import NewestEvent, PublicInput, PublicOutput, Timestamp
from turboserve.gateway.sessions.schemas import SessionId


class NewMigration(PublicInput):
    """A migration to begin."""

    worker: Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        None,
        description="The target, one of `/v1/workers`. `null`: the scheduler chooses.",
        examples=["wk_77d1e0"],
    )


class SessionDecision(PublicOutput):
    """One decision of the scheduler about the session, with its reason and its numbers."""

    epoch: int = Field(description="Number of the ownership that the decision is about.", examples=[2])
    worker: str | None = Field(
        description="The worker that the decision names. `null`: none.", examples=["wk_77d1e0"]
    )
    kind: str = Field(
        description="`place`, `resume`, `recover`, `rebuild` or `wait`: where the session runs. `migrate`, "
        "`migrated` or `stay`: a migration begins, is committed, or is abandoned. `release`: no worker owns "
        "the suspended session now. `device_error`: a step for the session broke its worker's device.",
        examples=["migrate"],
    )
    reason: str = Field(description="Why.", examples=["a chunk takes 0.05 s less on wk_77d1e0"])
    numbers: dict[str, float] = Field(
        description="The numbers that were compared, by name.", examples=[{"gain_s": 0.05}]
    )
    at: Timestamp = Field(description="When it was decided.")

    @classmethod
    def of(cls, decision: Decision) -> Self:
        return cls(**decision.model_dump(include=set(cls.model_fields)))


class DecisionList(PublicOutput):
    """The scheduler's decisions about one session."""

    decisions: list[SessionDecision] = Field(description="The decisions, oldest first.")


class StartedMigration(PublicOutput):
    """A migration that has begun. The event `session.migrated` or `session.migration_abandoned` ends it."""

    session: SessionId
    epoch: int = Field(
        description="Number of the current ownership. The commit of the migration raises it by one.",
        examples=[1],
    )
    worker: str | None = Field(
        description="The worker that runs the session until the commit.", examples=["wk_5f3a9c"]
    )
    target: str | None = Field(
        description="The worker that the session migrates to. `null`: the session is there already.",
        examples=["wk_77d1e0"],
    )
    migration: int | None = Field(
        description="Number of this migration, which no other migration of the session has. `null`: none.",
        examples=[12],
    )
    newest_event: NewestEvent
    decision: SessionDecision = Field(description="Why the scheduler chose this target.")

    @classmethod
    def of(cls, accepted: MigrationAccepted) -> Self:
        record = accepted.record
        return cls(
            session=record.id,
            epoch=record.epoch,
            worker=record.worker,
            target=record.target,
            migration=record.migration,
            newest_event=record.event_sequence,
            decision=SessionDecision.of(accepted.decision),
        )
