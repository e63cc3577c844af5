"""Events that are committed and not yet in the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.events import Event
from turboserve.state_store.ports.records import PendingEvent, outbox_values
from turboserve.state_store.tables import outbox


class SqlOutbox:
    """`OutboxRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def add(self, events: Iterable[Event]) -> None:
        values = [outbox_values(event) for event in events]
        if values:
            await self._db.execute(insert(outbox).values(values))

    async def oldest(self, limit: int) -> Sequence[PendingEvent]:
        query = select(outbox).order_by(outbox.c.number).limit(limit)
        return [PendingEvent(**row) for row in (await self._db.execute(query)).mappings()]

    async def remove(self, numbers: Iterable[int]) -> None:
        # The statement sets this itself, so that the removal needs no transaction around it.
        loose = func.set_config("synchronous_commit", "off", True) == "off"
        await self._db.execute(delete(outbox).where(outbox.c.number.in_(list(numbers)), loose))

    async def backlog(self) -> tuple[int, float | None]:
        count, since = (await self._db.execute(select(func.count(), func.min(outbox.c.created_at)))).one()
        return int(count), since
