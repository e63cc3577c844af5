"""How far the log has come, and what of it is past its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import ARRAY, BigInteger, Double, Text, cast, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store.repository.sessions import COLUMNS, record_of
from turboserve.state_store.tables import cursors, sessions


@dataclass(frozen=True)
class Reached:
    """How far the log has come with one session."""

    session: str
    next_chunk: int
    control_seq: int
    playhead_s: float | None


async def position(db: AsyncConnection, cursor: str) -> int:
    """The stream sequence up to which everything is counted; 0 at first."""
    await db.execute(pg_insert(cursors).values(name=cursor, sequence=0).on_conflict_do_nothing())
    query = select(cursors.c.sequence).where(cursors.c.name == cursor)
    return int((await db.execute(query)).scalar_one())


async def move(db: AsyncConnection, cursor: str, before: int, after: int) -> bool:
    """Move the position from `before` to `after`; False if it is not there any more."""
    query = update(cursors).where(cursors.c.name == cursor, cursors.c.sequence == before)
    return (await db.execute(query.values(sequence=after))).rowcount == 1


async def count(db: AsyncConnection, reached: Sequence[Reached]) -> dict[str, SessionRecord]:
    """Note how far the log has come, never backwards; the rows after it, without those that are not there."""
    if not reached:
        return {}
    news = (
        func.unnest(
            cast([item.session for item in reached], ARRAY(Text)),
            cast([item.next_chunk for item in reached], ARRAY(BigInteger)),
            cast([item.control_seq for item in reached], ARRAY(BigInteger)),
            cast([item.playhead_s for item in reached], ARRAY(Double)),
        )
        .table_valued("session", "next_chunk", "control_seq", "playhead_s", name="news")
        .render_derived()
    )
    query = (
        update(sessions)
        .where(sessions.c.id == news.c.session)
        .values(
            next_chunk=func.greatest(sessions.c.next_chunk, news.c.next_chunk),
            applied_control_seq=func.greatest(sessions.c.applied_control_seq, news.c.control_seq),
            playhead_s=func.coalesce(news.c.playhead_s, sessions.c.playhead_s),
        )
        .returning(*COLUMNS)
    )
    return {row["id"]: record_of(row) for row in (await db.execute(query)).mappings()}


async def unpurged(db: AsyncConnection, ended_before: float, limit: int) -> Sequence[str]:
    """Sessions whose chunks are due to be removed from the log, longest ended first."""
    query = (
        select(sessions.c.id)
        .where(sessions.c.purged_at.is_(None), sessions.c.ended_at < ended_before)
        .order_by(sessions.c.ended_at)
        .limit(limit)
    )
    return (await db.execute(query)).scalars().all()


async def unknown(db: AsyncConnection, ids: Sequence[str]) -> Sequence[str]:
    """Those of `ids` for which there is no row."""
    query = select(sessions.c.id).where(sessions.c.id.in_(list(ids)))
    known = set((await db.execute(query)).scalars().all())
    return [session for session in ids if session not in known]


async def mark_purged(db: AsyncConnection, ids: Iterable[str], now: float) -> None:
    await db.execute(update(sessions).where(sessions.c.id.in_(list(ids))).values(purged_at=now))


async def delete_ended(db: AsyncConnection, ended_before: float) -> int:
    """Delete rows whose chunks are gone from the log; controls and decisions go with them."""
    query = delete(sessions).where(sessions.c.ended_at < ended_before, sessions.c.purged_at.is_not(None))
    return (await db.execute(query)).rowcount
