"""The columns of the fence: which `own.<session>` is in the log."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.repository.sessions import COLUMNS, record_of
from turboserve.state_store.tables import sessions


class SqlFence:
    """`FenceRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def store(self, session: str, epoch: int, revision: int) -> SessionRecord | None:
        query = (
            update(sessions)
            .where(sessions.c.id == session, sessions.c.epoch == epoch)
            .values(own_revision=revision, fence_revision=revision)
            .returning(*COLUMNS)
        )
        row = (await self._db.execute(query)).mappings().first()
        return None if row is None else record_of(row)

    async def store_seen(self, session: str, epoch: int, revision: int) -> None:
        query = update(sessions).where(sessions.c.id == session, sessions.c.epoch == epoch)
        await self._db.execute(query.values(fence_revision=revision))

    async def reopen(self, session: str, epoch: int, stored: int, actual: int) -> bool:
        done = await self._db.execute(
            update(sessions)
            .where(sessions.c.id == session, sessions.c.epoch == epoch, sessions.c.own_revision == stored)
            .values(own_revision=None, fence_revision=actual, version=sessions.c.version + 1)
        )
        return done.rowcount == 1

    async def missing(self, limit: int) -> Sequence[str]:
        query = (
            select(sessions.c.id)
            .where(sessions.c.own_revision.is_(None), text("epoch > 0"), sessions.c.purged_at.is_(None))
            .order_by(sessions.c.updated_at)
            .limit(limit)
        )
        return (await self._db.execute(query)).scalars().all()

    async def settled(self) -> Sequence[tuple[str, int, int]]:
        query = select(sessions.c.id, sessions.c.epoch, sessions.c.own_revision).where(
            sessions.c.ended_at.is_(None), sessions.c.own_revision.is_not(None)
        )
        return [(row.id, row.epoch, row.own_revision) for row in await self._db.execute(query)]
