"""A change of a session, written as one statement: the row, its events and its decision."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.state_store.core.change import Change
from turboserve.state_store.repository.outbox import values_of
from turboserve.state_store.repository.sessions import FIELDS
from turboserve.state_store.tables import decisions, outbox, sessions

# What is the same for ever, and what the log tells and not a request.
_FIXED = {"id", "tenant", "model", "seed", "metadata", "created_at"}
_COUNTED = {"next_chunk", "applied_control_seq", "playhead_s"}
_CHANGING = set(FIELDS) - _FIXED - _COUNTED


async def create(db: AsyncConnection, change: Change) -> None:
    """Insert the row; the caller holds the admission lock and found no row of this id."""
    record = change.record
    values = record.model_dump(mode="json", include=set(FIELDS)) | {"first_prompt": record.prompt}
    row = insert(sessions).values(values).cte("row")
    for event in change.events:
        await db.execute(insert(outbox).values(values_of(event)).add_cte(row))


async def write(db: AsyncConnection, change: Change, *, migration_key: str | None = None) -> None:
    """Replace what changes; the caller holds the row's lock and has compared its version.

    `migration_key` is that of the move which the change begins. A change that ends a move erases its key.
    """
    record = change.record
    values: dict[str, Any] = record.model_dump(mode="json", include=_CHANGING)
    if record.phase.ended:
        values["ended_at"] = record.updated_at
    if record.move is None or migration_key is not None:
        values["migration_key"] = migration_key
    parts = [update(sessions).where(sessions.c.id == record.id).values(values).cte("row")]
    if change.decision is not None:
        decision = change.decision.model_dump(mode="json")
        parts.append(insert(decisions).values(version=record.version, **decision).cte("decision"))
    [event] = change.events
    await db.execute(insert(outbox).values(values_of(event)).add_cte(*parts))
