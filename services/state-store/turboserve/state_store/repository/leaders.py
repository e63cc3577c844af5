"""Rows of leaders. Commands hold a share of the row, so a new term waits for those that are under way."""

from __future__ import annotations

from sqlalchemy import Select, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.leading import LeaderRecord
from turboserve.state_store.tables import leaders


async def get(db: AsyncConnection, name: str) -> LeaderRecord:
    """The row as it is; one without a holder if nobody has led yet."""
    return await _read(db, name, _of(name))


async def share(db: AsyncConnection, name: str) -> LeaderRecord:
    """The row, whose term cannot change before this transaction ends; renewals go on meanwhile."""
    return await _read(db, name, _of(name).with_for_update(read=True, key_share=True))


async def lock(db: AsyncConnection, name: str, *, new_term: bool) -> LeaderRecord:
    """The row, for a renewal or (`new_term`) for a change of term; it is made if it is not there."""
    fresh = pg_insert(leaders).values(name=name, term=0, beat=0)
    if (await db.execute(_of(name))).first() is None:
        await db.execute(fresh.on_conflict_do_nothing(index_elements=[leaders.c.name]))
    return await _read(db, name, _of(name).with_for_update(key_share=not new_term))


async def write(db: AsyncConnection, record: LeaderRecord) -> None:
    """Replace the row; the caller holds its lock."""
    values = record.model_dump(exclude={"name"})
    await db.execute(update(leaders).where(leaders.c.name == record.name).values(values))


def _of(name: str) -> Select[tuple[object, ...]]:
    return select(leaders).where(leaders.c.name == name)


async def _read(db: AsyncConnection, name: str, query: Select[tuple[object, ...]]) -> LeaderRecord:
    row = (await db.execute(query)).mappings().first()
    return LeaderRecord(name=name) if row is None else LeaderRecord.model_validate(dict(row))
