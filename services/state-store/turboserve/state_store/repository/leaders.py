"""Rows of leaders. Commands hold a share of the row, so that a new term waits for current commands."""

from __future__ import annotations

from sqlalchemy import Select, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.leading import LeaderRecord
from turboserve.state_store.tables import leaders


def _of(name: str) -> Select[tuple[object, ...]]:
    return select(leaders).where(leaders.c.name == name)


class SqlLeaders:
    """`LeaderRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, name: str) -> LeaderRecord:
        return await self._read(name, _of(name))

    async def share(self, name: str) -> LeaderRecord:
        return await self._read(name, _of(name).with_for_update(read=True, key_share=True))

    async def lock(self, name: str, *, new_term: bool) -> LeaderRecord:
        fresh = pg_insert(leaders).values(name=name, term=0, beat=0)
        if (await self._db.execute(_of(name))).first() is None:
            await self._db.execute(fresh.on_conflict_do_nothing(index_elements=[leaders.c.name]))
        return await self._read(name, _of(name).with_for_update(key_share=not new_term))

    async def write(self, record: LeaderRecord) -> None:
        values = record.model_dump(exclude={"name"})
        await self._db.execute(update(leaders).where(leaders.c.name == record.name).values(values))

    async def _read(self, name: str, query: Select[tuple[object, ...]]) -> LeaderRecord:
        row = (await self._db.execute(query)).mappings().first()
        return LeaderRecord(name=name) if row is None else LeaderRecord.model_validate(dict(row))
