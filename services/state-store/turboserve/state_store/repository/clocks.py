"""The aging time, which survives restarts."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.state_store.core.aging import Aging
from turboserve.state_store.tables import clocks


class SqlClocks:
    """`ClockRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def get(self, name: str) -> Aging | None:
        query = select(clocks.c.aged_to, clocks.c.wall).where(clocks.c.name == name).with_for_update()
        row = (await self._db.execute(query)).first()
        return None if row is None else Aging(row.aged_to, row.wall)

    async def put(self, name: str, aging: Aging) -> None:
        values = {"aged_to": aging.aged_to, "wall": aging.wall}
        query = pg_insert(clocks).values(name=name, **values)
        await self._db.execute(query.on_conflict_do_update(index_elements=[clocks.c.name], set_=values))
