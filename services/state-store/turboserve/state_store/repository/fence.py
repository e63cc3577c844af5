"""The columns of the fence: what of `own.<session>` is in the log."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.repository.sessions import COLUMNS, record_of
from turboserve.state_store.tables import sessions


async def store(db: AsyncConnection, session: str, epoch: int, revision: int) -> SessionRecord | None:
    """Note that `own` of `epoch` has `revision`; None if the row is at another epoch by now."""
    query = (
        update(sessions)
        .where(sessions.c.id == session, sessions.c.epoch == epoch)
        .values(own_revision=revision, fence_revision=revision)
        .returning(*COLUMNS)
    )
    row = (await db.execute(query)).mappings().first()
    return None if row is None else record_of(row)


async def store_seen(db: AsyncConnection, session: str, epoch: int, revision: int) -> None:
    """Note the revision that the log was found at while the row was at `epoch`."""
    query = update(sessions).where(sessions.c.id == session, sessions.c.epoch == epoch)
    await db.execute(query.values(fence_revision=revision))


async def reopen(db: AsyncConnection, session: str, epoch: int, stored: int, actual: int) -> bool:
    """The log has lost `own` of `epoch`, which the row says is at `stored`: it is to be written again.

    The version is raised, so that the worker takes the new revision for news. False: the row says otherwise.
    """
    done = await db.execute(
        update(sessions)
        .where(sessions.c.id == session, sessions.c.epoch == epoch, sessions.c.own_revision == stored)
        .values(own_revision=None, fence_revision=actual, version=sessions.c.version + 1)
    )
    return done.rowcount == 1


async def missing(db: AsyncConnection, limit: int) -> Sequence[str]:
    """Sessions whose current epoch is not in the log, as far as the row says."""
    query = (
        select(sessions.c.id)
        .where(sessions.c.own_revision.is_(None), text("epoch > 0"), sessions.c.purged_at.is_(None))
        .order_by(sessions.c.updated_at)
        .limit(limit)
    )
    return (await db.execute(query)).scalars().all()


async def settled(db: AsyncConnection) -> Sequence[tuple[str, int, int]]:
    """(session, epoch, revision) of all that have not ended and whose fence is said to be in the log."""
    query = select(sessions.c.id, sessions.c.epoch, sessions.c.own_revision).where(
        sessions.c.ended_at.is_(None), sessions.c.own_revision.is_not(None)
    )
    return [(row.id, row.epoch, row.own_revision) for row in await db.execute(query)]
