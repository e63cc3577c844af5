"""Writes a change of a session as one statement: the row, its events and its decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import CTE, Insert, Update, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.events import SessionEvent
from turboserve.state_store.core.change import Change
from turboserve.state_store.ports.records import SESSION_CHANGING, SESSION_FIELDS, outbox_values
from turboserve.state_store.tables import decisions, outbox, sessions


class SqlChanges:
    """`ChangeRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def create(self, change: Change) -> None:
        record = change.record
        values = record.model_dump(mode="json", include=set(SESSION_FIELDS)) | {"first_prompt": record.prompt}
        await self._db.execute(_with_events(insert(sessions).values(values), [], change.events))

    async def write(self, change: Change, *, migration_key: str | None = None) -> None:
        record = change.record
        values: dict[str, Any] = record.model_dump(mode="json", include=set(SESSION_CHANGING))
        if record.phase.ended:
            values["ended_at"] = record.updated_at
        if record.migration is None or migration_key is not None:
            values["migration_key"] = migration_key
        row = update(sessions).where(sessions.c.id == record.id).values(values)
        parts = []
        if change.decision is not None:
            decision = change.decision.model_dump(mode="json")
            parts.append(insert(decisions).values(version=record.version, **decision).cte("decision"))
        await self._db.execute(_with_events(row, parts, change.events))


def _with_events(row: Insert | Update, parts: list[CTE], events: Sequence[SessionEvent]) -> Insert | Update:
    """Build a statement that writes the row, `parts` and the events, numbered in the order of `events`."""
    if not events:
        return row.add_cte(*parts)
    values = [outbox_values(event) for event in events]
    return insert(outbox).values(values[0] if len(values) == 1 else values).add_cte(row.cte("row"), *parts)
