"""Leaders, events, pools and clocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turboserve.contracts.events import Event
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.pool import PoolOrders, PoolReport
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import PoolEntry
from turboserve.simulation.runtime.rows.webhooks import insert_deliveries
from turboserve.state_store.core.aging import Aging
from turboserve.state_store.ports.records import PendingEvent, pool_orders, with_learned
from turboserve.state_store.publish.outbox import outbox_values


def insert_events(db: Session, events: Iterable[Event]) -> None:
    """Insert events into the outbox. Raises ConflictError if it has an event's id."""
    table = db.tables.outbox
    for event in events:
        number = db.tables.number(table)
        db.insert(table, number, PendingEvent(number=number, **outbox_values(event)))


class MemoryOutbox:
    """`OutboxRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.outbox

    async def add(self, events: Iterable[Event]) -> None:
        wanted = list(events)
        if wanted:
            await self._db.execute(lambda: insert_events(self._db, wanted))

    async def oldest(self, limit: int) -> Sequence[PendingEvent]:
        def run() -> list[PendingEvent]:
            return [event for _, event in sorted(self._db.all(self._rows), key=lambda row: row[0])[:limit]]

        return await self._db.execute(run)

    async def remove(self, numbers: Iterable[int]) -> None:
        wanted = list(numbers)

        def run() -> None:
            for number in sorted(wanted):
                event = self._db.get(self._rows, number)
                if event is not None and self._db.delete(self._rows, number):
                    insert_deliveries(self._db, event)
            self._db.durable = False

        await self._db.execute(run)

    async def backlog(self) -> tuple[int, float | None]:
        def run() -> tuple[int, float | None]:
            times = [event.created_at for _, event in self._db.all(self._rows)]
            return len(times), min(times, default=None)

        return await self._db.execute(run)


class MemoryLeaders:
    """`LeaderRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.leaders

    async def get(self, name: str) -> LeaderRecord:
        return await self._db.execute(lambda: self._db.get(self._rows, name) or LeaderRecord(name=name))

    async def share(self, name: str) -> LeaderRecord:
        return await self._locked(name, LockMode.KEY_SHARE)

    async def lock(self, name: str, *, new_term: bool) -> LeaderRecord:
        def make() -> None:
            self._db.insert_if_absent(self._rows, name, LeaderRecord(name=name))

        if await self._db.execute(lambda: self._db.get(self._rows, name)) is None:
            await self._db.execute(make)
        return await self._locked(name, LockMode.UPDATE if new_term else LockMode.NO_KEY_UPDATE)

    async def write(self, record: LeaderRecord) -> None:
        def run() -> None:
            if self._db.lock(self._rows, record.name, LockMode.NO_KEY_UPDATE) is not None:
                self._db.update(self._rows, record.name, record)

        await self._db.execute(run)

    async def _locked(self, name: str, mode: LockMode) -> LeaderRecord:
        return await self._db.execute(
            lambda: self._db.lock(self._rows, name, mode) or LeaderRecord(name=name)
        )


class MemoryPools:
    """`PoolRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.pools

    async def reported(self, report: PoolReport, now: float) -> PoolOrders:
        entry = PoolEntry(
            report.model,
            report.maximum,
            now,
            report.absorbs,
            report.absorbs_at_maximum,
            report.decode_sessions,
            learned=report.learned,
        )

        def run() -> PoolOrders:
            if self._db.insert_if_absent(self._rows, report.pool, entry):
                return with_learned(_orders(report.pool, entry), entry.learned if report.recalls else None)
            before = self._db.lock(self._rows, report.pool, LockMode.NO_KEY_UPDATE)
            assert before is not None
            kept = before.learned if report.learned is None else report.learned
            after = replace(
                entry, orders=before.orders, process=before.process, former=before.former, learned=kept
            )
            self._db.update(self._rows, report.pool, after)
            return with_learned(_orders(report.pool, after), after.learned if report.recalls else None)

        return await self._db.execute(run)

    async def processes(self, pool: str) -> tuple[str | None, tuple[str, ...]]:
        def run() -> tuple[str | None, tuple[str, ...]]:
            entry = self._db.lock(self._rows, pool, LockMode.UPDATE)
            return (None, ()) if entry is None else (entry.process, entry.former)

        return await self._db.execute(run)

    async def replaced(self, pool: str, process: str, former: tuple[str, ...]) -> None:
        def run() -> None:
            entry = self._db.lock(self._rows, pool, LockMode.NO_KEY_UPDATE)
            if entry is not None:
                self._db.update(self._rows, pool, replace(entry, process=process, former=former))

        await self._db.execute(run)

    async def get(self, pool: str, *, lock: bool = False) -> PoolOrders | None:
        def run() -> PoolOrders | None:
            entry = self._db.lock(self._rows, pool) if lock else self._db.get(self._rows, pool)
            return None if entry is None else _orders(pool, entry)

        return await self._db.execute(run)

    async def write(self, orders: PoolOrders, changed: Collection[str]) -> None:
        values: Mapping[str, Any] = orders.model_dump(mode="json", include={*changed, "version"})

        def run() -> None:
            entry = self._db.lock(self._rows, orders.pool, LockMode.NO_KEY_UPDATE)
            if entry is not None:
                after = replace(entry, orders={**entry.orders, **values})
                self._db.update(self._rows, orders.pool, after)

        await self._db.execute(run)


def _orders(pool: str, entry: PoolEntry) -> PoolOrders:
    if not entry.orders:
        return PoolOrders(pool=pool)
    return pool_orders({"pool": pool, "table": None, **entry.orders})


class MemoryClocks:
    """`ClockRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.clocks

    async def get(self, name: str) -> Aging | None:
        return await self._db.execute(lambda: self._db.lock(self._rows, name, LockMode.UPDATE))

    async def put(self, name: str, aging: Aging) -> None:
        def run() -> None:
            if not self._db.insert_if_absent(self._rows, name, aging):
                self._db.lock(self._rows, name, LockMode.NO_KEY_UPDATE)
                self._db.update(self._rows, name, aging)

        await self._db.execute(run)
