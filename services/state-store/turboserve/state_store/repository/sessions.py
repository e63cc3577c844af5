"""Reads rows of sessions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import and_, or_, select
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.requests import CreateSession, ListSessions
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming, MigrationKey
from turboserve.state_store.ports.records import SESSION_FIELDS, SessionRow
from turboserve.state_store.tables import sessions, workers

COLUMNS = tuple(sessions.c[name] for name in SESSION_FIELDS)
LIVE = sessions.c.ended_at.is_(None)


def record_of(row: RowMapping | Mapping[str, Any]) -> SessionRecord:
    return SessionRecord.model_validate({name: row[name] for name in SESSION_FIELDS})


class SqlSessions:
    """`SessionRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, session: str) -> SessionRecord | None:
        row = (await self._db.execute(select(*COLUMNS).where(sessions.c.id == session))).mappings().first()
        return None if row is None else record_of(row)

    async def get_row(self, session: str, *, lock: bool = False) -> SessionRow | None:
        query = select(*COLUMNS, sessions.c.fence_revision).where(sessions.c.id == session)
        row = (await self._db.execute(query.with_for_update() if lock else query)).mappings().first()
        return None if row is None else SessionRow(record_of(row), row["fence_revision"])

    async def created_by(self, request: CreateSession) -> bool:
        query = select(sessions.c.id).where(
            sessions.c.id == request.id,
            sessions.c.tenant == request.tenant,
            sessions.c.model == request.model,
            sessions.c.first_prompt == request.prompt,
            sessions.c.seed == request.seed,
            sessions.c.metadata == request.metadata,
        )
        return (await self._db.execute(query)).first() is not None

    async def page(self, request: ListSessions, before: int | None) -> list[tuple[int, SessionRecord]]:
        query = (
            select(sessions.c.number, *COLUMNS).order_by(sessions.c.number.desc()).limit(request.limit + 1)
        )
        if request.tenant is not None:
            query = query.where(sessions.c.tenant == request.tenant)
        if request.phases:
            query = query.where(sessions.c.phase.in_([phase.value for phase in request.phases]))
            if not any(phase.ended for phase in request.phases):
                query = query.where(LIVE)
        if before is not None:
            query = query.where(sessions.c.number < before)
        return [(row["number"], record_of(row)) for row in (await self._db.execute(query)).mappings()]

    async def suspended_since(self, before: float, limit: int) -> list[SessionRecord]:
        suspended = and_(sessions.c.phase == Phase.SUSPENDED.value, sessions.c.updated_at < before, LIVE)
        query = select(*COLUMNS).where(suspended).order_by(sessions.c.updated_at).limit(limit)
        return [record_of(row) for row in (await self._db.execute(query)).mappings()]

    async def assigned(self, worker: str, held: Collection[str]) -> list[SessionRecord]:
        concerns = or_(
            sessions.c.phase != Phase.SUSPENDED.value,
            sessions.c.id.in_(held),
            sessions.c.target.is_not(None),
        )
        query = (
            select(*COLUMNS).where(sessions.c.worker == worker, LIVE, concerns).order_by(sessions.c.number)
        )
        return [record_of(row) for row in (await self._db.execute(query)).mappings()]

    async def migration_keys(self, worker: str, session: str | None = None) -> tuple[MigrationKey, ...]:
        mine = or_(sessions.c.worker == worker, sessions.c.target == worker)
        query = (
            select(sessions.c.id, sessions.c.migration, sessions.c.migration_key)
            .where(mine, sessions.c.target.is_not(None), sessions.c.migration_key.is_not(None), LIVE)
            .order_by(sessions.c.number)
        )
        if session is not None:
            query = query.where(sessions.c.id == session)
        return tuple(
            MigrationKey(session=row["id"], migration=row["migration"], key=row["migration_key"])
            for row in (await self._db.execute(query)).mappings()
        )

    async def migrating_to(self, worker: str) -> list[Incoming]:
        source = workers.alias("source")
        query = (
            select(*COLUMNS, source.c.transfer)
            .join(source, source.c.id == sessions.c.worker, isouter=True)
            .where(sessions.c.target == worker, LIVE)
            .order_by(sessions.c.number)
        )
        return [
            Incoming(record=record_of(row), source=tuple(row["transfer"] or ()))
            for row in (await self._db.execute(query)).mappings()
        ]
