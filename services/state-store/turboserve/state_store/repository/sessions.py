"""Rows of sessions, read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, or_, select
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.requests import CreateSession, ListSessions
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey
from turboserve.state_store.tables import sessions, workers

FIELDS = tuple(name for name in SessionRecord.model_fields if name in sessions.c)
COLUMNS = tuple(sessions.c[name] for name in FIELDS)
LIVE = sessions.c.ended_at.is_(None)


@dataclass(frozen=True)
class Row:
    """A record, and the newest revision of its `own` subject that the store knows (0: none)."""

    record: SessionRecord
    fence_revision: int


def record_of(row: RowMapping | Mapping[str, Any]) -> SessionRecord:
    return SessionRecord.model_validate({name: row[name] for name in FIELDS})


async def get(db: AsyncConnection, session: str) -> SessionRecord | None:
    row = (await db.execute(select(*COLUMNS).where(sessions.c.id == session))).mappings().first()
    return None if row is None else record_of(row)


async def get_row(db: AsyncConnection, session: str, *, lock: bool = False) -> Row | None:
    """With `lock`: nobody else changes it until the transaction ends."""
    query = select(*COLUMNS, sessions.c.fence_revision).where(sessions.c.id == session)
    row = (await db.execute(query.with_for_update() if lock else query)).mappings().first()
    return None if row is None else Row(record_of(row), row["fence_revision"])


async def created_by(db: AsyncConnection, request: CreateSession) -> bool:
    """Whether the row of this id was made by this very request."""
    query = select(sessions.c.id).where(
        sessions.c.id == request.id,
        sessions.c.tenant == request.tenant,
        sessions.c.model == request.model,
        sessions.c.first_prompt == request.prompt,
        sessions.c.seed == request.seed,
        sessions.c.metadata == request.metadata,
    )
    return (await db.execute(query)).first() is not None


async def page(
    db: AsyncConnection, request: ListSessions, before: int | None
) -> list[tuple[int, SessionRecord]]:
    """Newest first, each with its number; one more than the limit, to show if there is more."""
    query = select(sessions.c.number, *COLUMNS).order_by(sessions.c.number.desc()).limit(request.limit + 1)
    if request.tenant is not None:
        query = query.where(sessions.c.tenant == request.tenant)
    if request.phases:
        query = query.where(sessions.c.phase.in_([phase.value for phase in request.phases]))
        if not any(phase.ended for phase in request.phases):
            query = query.where(LIVE)
    if before is not None:
        query = query.where(sessions.c.number < before)
    return [(row["number"], record_of(row)) for row in (await db.execute(query)).mappings()]


async def asleep_since(db: AsyncConnection, before: float, limit: int) -> list[SessionRecord]:
    """Suspended and unchanged since `before`, the longest first."""
    asleep = and_(sessions.c.phase == Phase.SUSPENDED.value, sessions.c.updated_at < before, LIVE)
    query = select(*COLUMNS).where(asleep).order_by(sessions.c.updated_at).limit(limit)
    return [record_of(row) for row in (await db.execute(query)).mappings()]


async def assigned(db: AsyncConnection, worker: str, held: Collection[str]) -> list[SessionRecord]:
    """All that have not ended and name this worker, oldest first.

    Suspended sessions are listed if they are in `held`, or if they migrate: their target asks this worker for
    the state, and this worker has to answer if there is none.
    """
    concerns = or_(
        sessions.c.phase != Phase.SUSPENDED.value,
        sessions.c.id.in_(held),
        sessions.c.target.is_not(None),
    )
    query = select(*COLUMNS).where(sessions.c.worker == worker, LIVE, concerns).order_by(sessions.c.number)
    return [record_of(row) for row in (await db.execute(query)).mappings()]


async def migration_keys(
    db: AsyncConnection, worker: str, session: str | None = None
) -> tuple[MigrationKey, ...]:
    """Keys of the live migrations from or to this worker; with `session`, of that one alone."""
    mine = or_(sessions.c.worker == worker, sessions.c.target == worker)
    query = (
        select(sessions.c.id, sessions.c.move, sessions.c.migration_key)
        .where(mine, sessions.c.target.is_not(None), sessions.c.migration_key.is_not(None), LIVE)
        .order_by(sessions.c.number)
    )
    if session is not None:
        query = query.where(sessions.c.id == session)
    return tuple(
        MigrationKey(session=row["id"], move=row["move"], key=row["migration_key"])
        for row in (await db.execute(query)).mappings()
    )


async def moving_to(db: AsyncConnection, worker: str) -> list[Incoming]:
    """All that are moving to this worker, oldest first, with the addresses of where they are."""
    source = workers.alias("source")
    query = (
        select(*COLUMNS, source.c.transfer)
        .join(source, source.c.id == sessions.c.worker, isouter=True)
        .where(sessions.c.target == worker, LIVE)
        .order_by(sessions.c.number)
    )
    return [
        Incoming(record=record_of(row), source=tuple(row["transfer"] or ()))
        for row in (await db.execute(query)).mappings()
    ]
