"""How far the log has come, and what of it is past its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.repository.sessions import COLUMNS, record_of
from turboserve.state_store.tables import sessions


async def count_chunk(
    db: AsyncConnection, session: str, next_chunk: int, control_seq: int, playhead_s: float | None
) -> SessionRecord | None:
    """Note how far the log has come; never backwards. The row after it, or None if there is none."""
    values: dict[str, Any] = {
        "next_chunk": func.greatest(sessions.c.next_chunk, next_chunk),
        "applied_control_seq": func.greatest(sessions.c.applied_control_seq, control_seq),
    }
    if playhead_s is not None:
        values["playhead_s"] = playhead_s
    query = update(sessions).where(sessions.c.id == session).values(values).returning(*COLUMNS)
    row = (await db.execute(query)).mappings().first()
    return None if row is None else record_of(row)


async def unpurged(db: AsyncConnection, ended_before: float, limit: int) -> Sequence[str]:
    """Sessions whose chunks are due to be removed from the log, longest ended first."""
    query = (
        select(sessions.c.id)
        .where(sessions.c.purged_at.is_(None), sessions.c.ended_at < ended_before)
        .order_by(sessions.c.ended_at)
        .limit(limit)
    )
    return (await db.execute(query)).scalars().all()


async def mark_purged(db: AsyncConnection, ids: Iterable[str], now: float) -> None:
    await db.execute(update(sessions).where(sessions.c.id.in_(list(ids))).values(purged_at=now))


async def delete_ended(db: AsyncConnection, ended_before: float) -> int:
    """Delete rows whose chunks are gone from the log; controls and decisions go with them."""
    query = delete(sessions).where(sessions.c.ended_at < ended_before, sessions.c.purged_at.is_not(None))
    return (await db.execute(query)).rowcount
