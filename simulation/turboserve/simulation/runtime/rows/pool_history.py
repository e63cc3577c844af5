"""Rows of the history of pools, past migrations and waiting sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from turboserve.contracts.cost import ModelCost
from turboserve.contracts.pool_history import (
    ListLanes,
    ListMigrations,
    ListPoolDecisions,
    ListWaiting,
    MigrationPage,
    PastMigration,
    PoolDecision,
    PoolDecisionPage,
    PoolRange,
    PoolSample,
    StoredDecision,
    TenantCost,
    WaitingPage,
    WaitingSession,
    WorkerLane,
)
from turboserve.simulation.runtime.rows import pool_cost
from turboserve.simulation.runtime.rows.admission import waits
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import DecisionEntry, SessionEntry, Table
from turboserve.state_store.core.chunk_history import ChunkRow
from turboserve.state_store.core.paging import first_page
from turboserve.state_store.core.pool_history import ENDING, OWNING, ChunkCount, merged, past_migration
from turboserve.state_store.ports.pool_history import HistoryTable


def _within(at: float, request: PoolRange) -> bool:
    return request.since <= at < request.until


def _at(key: Any, row: Any) -> float:
    """Return the time of a row of any table of the history."""
    return row[1].at if isinstance(row, tuple) else float(key[-1])


class MemoryPoolHistory:
    """`PoolHistoryRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._tables = session, session.tables

    def _of_pool(self, worker: str | None, request: PoolRange) -> bool:
        row = None if worker is None else self._db.get(self._tables.rentals, worker)
        pool = None if row is None else row.pool
        return pool == request.pool if request.managed else pool is None

    async def add_sample(self, pool: str, at: int, sample: PoolSample) -> None:
        rows = self._tables.pool_samples

        def run() -> None:
            if not self._db.insert_if_absent(rows, (pool, at), sample):
                before = self._db.lock(rows, (pool, at))
                assert before is not None
                self._db.update(rows, (pool, at), merged(before, sample))

        await self._db.execute(run)

    async def add_decisions(self, pool: str, process: str, decisions: Sequence[PoolDecision]) -> None:
        rows = self._tables.pool_decisions

        def run() -> None:
            for one in decisions:
                number = self._tables.number(rows)
                self._db.insert_if_absent(rows, (pool, process, one.number), (number, one))

        if decisions:
            await self._db.execute(run)

    async def add_chunks(self, rows: Iterable[ChunkRow]) -> None:
        table, wanted = self._tables.worker_chunks, list(rows)

        def run() -> None:
            for row in wanted:
                key = row.worker, row.at
                if not self._db.insert_if_absent(table, key, row):
                    old = self._db.lock(table, key)
                    assert old is not None
                    sums = {name: getattr(old, name) + getattr(row, name) for name in _ADDED}
                    self._db.update(table, key, replace(old, **sums))

        if wanted:
            await self._db.execute(run)

    async def samples(self, request: PoolRange) -> list[tuple[int, PoolSample]]:
        def run() -> list[tuple[int, PoolSample]]:
            found = self._db.all(self._tables.pool_samples)
            mine = [(at, row) for (pool, at), row in found if pool == request.pool and _within(at, request)]
            return sorted(mine, key=lambda item: item[0])

        return await self._db.execute(run)

    async def chunk_counts(self, request: PoolRange) -> list[ChunkCount]:
        def run() -> list[ChunkCount]:
            sums: dict[int, ChunkCount] = {}
            for (worker, at), row in self._db.all(self._tables.worker_chunks):
                if _within(at, request) and self._of_pool(worker, request):
                    old = sums.get(at, ChunkCount(at, 0, 0, 0))
                    sums[at] = ChunkCount(
                        at, old.chunks + row.chunks, old.late + row.late, old.lowered + row.lowered
                    )
            return [count for _, count in sorted(sums.items())]

        return await self._db.execute(run)

    async def decisions(self, request: ListPoolDecisions) -> PoolDecisionPage:
        def run() -> PoolDecisionPage:
            found = [
                StoredDecision(id=number, **one.model_dump())
                for (pool, _, _), (number, one) in self._db.all(self._tables.pool_decisions)
                if pool == request.pool
                and _within(one.at, request)
                and (request.after is None or number < request.after)
            ]
            found.sort(key=lambda row: -row.id)
            shown, after = first_page(found, request.limit, lambda row: row.id)
            return PoolDecisionPage(decisions=tuple(shown), next=after)

        return await self._db.execute(run)

    async def migrations(self, request: ListMigrations) -> MigrationPage:
        def run() -> MigrationPage:
            found = [
                (number, entry)
                for number, entry in self._db.all(self._tables.decisions)
                if entry.decision.kind == "migrate"
                and entry.version is not None
                and _within(entry.decision.at, request)
                and self._of_pool(entry.decision.worker, request)
                and (request.after is None or number < request.after)
            ]
            found.sort(key=lambda row: -row[0])
            shown, after = first_page(found, request.limit, itemgetter(0))
            page = tuple(self._migration(number, entry) for number, entry in shown)
            return MigrationPage(migrations=page, next=after)

        return await self._db.execute(run)

    def _migration(self, number: int, entry: DecisionEntry) -> PastMigration:
        begun = entry.decision
        found = self._db.find(self._tables.decisions, "session", begun.session)
        others = sorted(((at, other.decision) for at, other in found), key=lambda item: item[0])
        owners = [one.worker for at, one in others if at < number and one.kind in OWNING]
        over = next(
            (
                one
                for at, one in others
                if at > number and one.kind in ENDING and one.numbers.get("migration") == entry.version
            ),
            None,
        )
        session = self._db.get(self._tables.sessions, begun.session)
        assert session is not None
        return past_migration(
            None if over is None else over.kind,
            runs=session.record.migration == entry.version,
            session=begun.session,
            tenant=session.record.tenant,
            migration=entry.version,
            source=owners[-1] if owners else None,
            target=begun.worker,
            reason=begun.reason,
            numbers=begun.numbers,
            began_at=begun.at,
            ended_at=None if over is None else over.at,
            detail="" if over is None else over.reason,
        )

    async def lanes(self, request: ListLanes) -> list[WorkerLane]:
        def run() -> list[WorkerLane]:
            found = [
                WorkerLane(
                    worker=worker,
                    member=entry.record.pool_member,
                    phase=entry.record.phase,
                    capacity=entry.record.capacity,
                    started_at=entry.record.started_at,
                    gone_at=entry.gone_at,
                )
                for worker, entry in sorted(self._db.all(self._tables.workers), key=lambda item: item[0])
                if entry.record.started_at < request.until
                and (entry.gone_at is None or entry.gone_at >= request.since)
                and self._of_pool(worker, request)
                and (request.after is None or worker > request.after)
            ]
            return found[: request.limit + 1]

        return await self._db.execute(run)

    async def chunks(self, worker: str, request: PoolRange) -> list[ChunkRow]:
        def run() -> list[ChunkRow]:
            found = self._db.all(self._tables.worker_chunks)
            mine = [row for (name, at), row in found if name == worker and _within(at, request)]
            return sorted(mine, key=lambda row: row.at)

        return await self._db.execute(run)

    async def tenants(self, named: Collection[str]) -> Mapping[str, str]:
        def run() -> dict[str, str]:
            rows = {session: self._db.get(self._tables.sessions, session) for session in named}
            return {session: row.record.tenant for session, row in rows.items() if row is not None}

        return await self._db.execute(run)

    async def costs(self, request: PoolRange) -> Mapping[int, tuple[float, float]]:
        return await self._db.execute(lambda: pool_cost.by_minute(self._db, request))

    async def tenant_costs(self, request: PoolRange) -> list[TenantCost]:
        return await self._db.execute(lambda: pool_cost.by_tenant(self._db, request))

    async def model_costs(self, request: PoolRange) -> list[ModelCost]:
        return await self._db.execute(lambda: pool_cost.by_model(self._db, request))

    async def waiting(self, request: ListWaiting) -> WaitingPage:
        def run() -> WaitingPage:
            rows = [
                (_since(entry), entry.number, entry)
                for _, entry in self._db.all(self._tables.sessions)
                if entry.ended_at is None
                and waits(entry.record)
                and request.model in (None, entry.record.model)
            ]
            rows.sort(key=lambda row: row[:2])
            found = tuple(self._waiting(since, entry) for since, _, entry in rows[: request.limit])
            return WaitingPage(sessions=found, total=len(rows))

        return await self._db.execute(run)

    def _waiting(self, since: float, entry: SessionEntry) -> WaitingSession:
        record = entry.record
        numbered = self._db.find(self._tables.decisions, "session", record.id)
        newest = max(numbered, key=lambda item: item[0], default=None)
        return WaitingSession(
            session=record.id,
            tenant=record.tenant,
            model=record.model,
            since=since,
            weight=record.weight,
            reason=None if newest is None else newest[1].decision.reason,
        )

    def _table(self, table: HistoryTable) -> Table[Any, Any]:
        found: Table[Any, Any] = getattr(self._tables, table.value)
        return found

    async def oldest(self, table: HistoryTable) -> int | None:
        rows = self._table(table)
        times = await self._db.execute(lambda: [_at(*item) for item in self._db.all(rows)])
        return int(min(times)) if times else None

    async def beyond(self, table: HistoryTable, rows: int) -> int | None:
        there = self._table(table)
        times = await self._db.execute(lambda: [_at(*item) for item in self._db.all(there)])
        return int(sorted(times, reverse=True)[rows]) if len(times) > rows else None

    async def delete_before(self, table: HistoryTable, at: int) -> None:
        rows = self._table(table)

        def run() -> None:
            for key, row in self._db.all(rows):
                if _at(key, row) < at:
                    self._db.delete(rows, key)

        await self._db.execute(run)


_ADDED = ("chunks", "late", "lowered", "body")


def _since(entry: SessionEntry) -> float:
    record = entry.record
    return record.created_at if record.requested_at is None else record.requested_at
