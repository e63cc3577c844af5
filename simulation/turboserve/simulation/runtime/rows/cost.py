"""Rentals, the sessions' shares of them, and corrections."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import replace
from typing import Any

from turboserve.contracts.cost import Correction, Cost, PoolCost, SessionCost
from turboserve.contracts.usage import ListUsage, UsagePage
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import CorrectionEntry
from turboserve.simulation.runtime.rows.usage import Used, add_usage, forget_usage, lock_usage, usage_page
from turboserve.state_store.core.rentals import RentalRow

_LOCK = ("advisory", "cost")
_NOTHING = Cost(gpu_seconds=0.0, money=0.0)


def _money(row: RentalRow) -> float:
    return row.gpu_seconds * row.price_hour / 3_600.0


def _sum(costs: Iterable[Cost | Correction]) -> Cost:
    gpu_seconds = money = 0.0
    for cost in costs:
        gpu_seconds, money = gpu_seconds + cost.gpu_seconds, money + cost.money
    return Cost(gpu_seconds=gpu_seconds, money=money)


class MemoryRentals:
    """`RentalRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.rentals

    async def lock(self) -> None:
        await self._db.execute(lambda: self._db.take(_LOCK))

    async def of_pool(self, pool: str, named: Collection[str]) -> dict[str, RentalRow]:
        def run() -> dict[str, RentalRow]:
            return {
                worker: row
                for worker, row in self._db.all(self._rows)
                if (row.pool == pool and row.ended_at is None) or worker in named
            }

        return await self._db.execute(run)

    async def beside_workers(self) -> list[tuple[RentalRow | None, WorkerRecord]]:
        def run() -> list[tuple[RentalRow | None, WorkerRecord]]:
            found = []
            for worker, entry in self._db.all(self._db.tables.workers):
                row = self._db.get(self._rows, worker)
                if entry.record.phase is not WorkerPhase.GONE if row is None else row.ended_at is None:
                    found.append((row, entry.record))
            return found

        return await self._db.execute(run)

    async def put(self, rows: Iterable[RentalRow]) -> None:
        wanted = list(rows)

        def run() -> None:
            for row in wanted:
                if not self._db.insert_if_absent(self._rows, row.worker, row):
                    before = self._db.lock(self._rows, row.worker, LockMode.NO_KEY_UPDATE)
                    assert before is not None
                    self._db.update(self._rows, row.worker, replace(row, accrued_s=before.accrued_s))

        if wanted:
            await self._db.execute(run)

    async def accrue(self, hour: int, minute: int) -> None:
        sessions, costs = self._db.tables.sessions, self._db.tables.session_costs
        past = self._db.tables.pool_costs, self._db.tables.pool_model_costs

        def run() -> None:
            due: list[RentalRow] = []
            for worker, row in self._db.all(self._rows):
                if row.accrued_s < row.paid_s:
                    locked = self._db.lock(self._rows, worker, LockMode.UPDATE)
                    if locked is not None and locked.accrued_s < locked.paid_s:
                        due.append(locked)
            shares: list[tuple[str, Cost]] = []
            # By pool and tenant, and by pool and model. Time that no session pays has ''.
            of_pools: tuple[dict[tuple[str, str], list[Cost]], ...] = ({}, {})
            for row in due:
                here = [
                    session
                    for session, entry in self._db.find(sessions, "worker", row.worker)
                    if entry.record.phase.holds_slot
                ]
                if not here:
                    whole = (row.paid_s - row.accrued_s) * row.gpus
                    paid = Cost(gpu_seconds=whole, money=whole * row.price_hour / 3_600.0)
                    for parts in of_pools:
                        parts.setdefault((row.pool or "", ""), []).append(paid)
                for session in here:
                    share = (row.paid_s - row.accrued_s) * row.gpus / len(here)
                    money = share * row.price_hour / 3_600.0
                    shares.append((session, Cost(gpu_seconds=share, money=money)))
                    entry = self._db.get(sessions, session)
                    assert entry is not None
                    for parts, name in zip(of_pools, (entry.record.tenant, entry.record.model), strict=True):
                        parts.setdefault((row.pool or "", name), []).append(shares[-1][1])
                    if self._db.lock(costs, session, LockMode.NO_KEY_UPDATE) is None:
                        self._db.insert_if_absent(costs, session, _NOTHING)
            used: dict[tuple[str, str, str], Used] = {}
            for session, given in shares:
                entry = self._db.get(sessions, session)
                assert entry is not None
                place = entry.record.tenant, entry.record.key or "", entry.record.model
                sums = used.get(place, Used())
                used[place] = Used(sums.gpu_seconds + given.gpu_seconds, sums.money + given.money)
            lock_usage(self._db, hour, used)
            add_usage(self._db, hour, used)
            for session, given in shares:
                before = self._db.get(costs, session)
                assert before is not None
                self._db.update(costs, session, _sum((before, given)))
            for table, of_pool in zip(past, of_pools, strict=True):
                for (pool, name), costs_of in sorted(of_pool.items()):
                    key = pool, name, minute
                    if not self._db.insert_if_absent(table, key, _sum(costs_of)):
                        earlier = self._db.lock(table, key, LockMode.NO_KEY_UPDATE)
                        assert earlier is not None
                        self._db.update(table, key, _sum((earlier, *costs_of)))
            for row in due:
                seconds = row.paid_s - row.accrued_s
                self._db.update(self._rows, row.worker, replace(row, accrued_s=row.accrued_s + seconds))

        await self._db.execute(run)

    async def usage(self, request: ListUsage) -> UsagePage:
        return await self._db.execute(lambda: usage_page(self._db, request))

    async def forget_usage(self, before_day: int) -> None:
        await self._db.execute(lambda: forget_usage(self._db, before_day))

    async def by_kind(self) -> list[dict[str, Any]]:
        def run() -> list[dict[str, Any]]:
            return [
                {
                    "kind": kind,
                    "workers": len(rows),
                    "running": sum(row.ended_at is None for row in rows),
                    "gpu_seconds": sum(row.gpu_seconds for row in rows),
                    "starting_gpu_seconds": sum(row.starting_s * row.gpus for row in rows),
                    "estimated_gpu_seconds": sum(row.estimated_s * row.gpus for row in rows),
                    "money": sum(_money(row) for row in rows),
                    "since": min(row.started_at for row in rows),
                }
                for kind, rows in sorted(self._grouped("kind").items())
            ]

        return await self._db.execute(run)

    async def by_pool(self) -> list[PoolCost]:
        def run() -> list[PoolCost]:
            pools = sorted(self._grouped("pool").items(), key=lambda item: (item[0] is None, item[0] or ""))
            return [
                PoolCost(
                    pool=pool,
                    gpu_seconds=sum(row.gpu_seconds for row in rows),
                    money=sum(_money(row) for row in rows),
                )
                for pool, rows in pools
            ]

        return await self._db.execute(run)

    def _grouped(self, column: str) -> dict[Any, list[RentalRow]]:
        groups: dict[Hashable, list[RentalRow]] = {}
        for _, row in self._db.all(self._rows):
            groups.setdefault(getattr(row, column), []).append(row)
        return groups

    async def used(self) -> Cost:
        costs = self._db.tables.session_costs
        return await self._db.execute(lambda: _sum(cost for _, cost in self._db.all(costs)))

    async def of_sessions(self, tenant: str | None, session: str | None, limit: int) -> list[SessionCost]:
        tables = self._db.tables

        def run() -> list[SessionCost]:
            entries = [
                entry
                for key, entry in self._db.all(tables.sessions)
                if tenant in (None, entry.record.tenant) and session in (None, key)
            ]
            entries.sort(key=lambda entry: -entry.number)
            found = []
            for entry in entries[:limit]:
                record = entry.record
                share = self._db.get(tables.session_costs, record.id) or _NOTHING
                corrected = _sum(
                    other.correction for _, other in self._db.find(tables.corrections, "session", record.id)
                )
                found.append(
                    SessionCost(
                        session=record.id,
                        model=record.model,
                        phase=record.phase,
                        gpu_seconds=share.gpu_seconds,
                        money=share.money,
                        corrected_gpu_seconds=corrected.gpu_seconds,
                        corrected_money=corrected.money,
                    )
                )
            return found

        return await self._db.execute(run)


class MemoryCorrections:
    """`CorrectionRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.corrections

    async def add(self, correction: Correction) -> Correction:
        def run() -> Correction:
            number = self._db.tables.number(self._rows)
            self._db.insert_if_absent(self._rows, correction.id, CorrectionEntry(correction, number))
            entry = self._db.get(self._rows, correction.id)
            assert entry is not None
            return entry.correction

        return await self._db.execute(run)

    async def total(self, session: str | None = None) -> Cost:
        def run() -> Cost:
            if session is not None:
                found = self._db.find(self._rows, "session", session)
            else:
                found = self._db.all(self._rows)
            return _sum(entry.correction for _, entry in found)

        return await self._db.execute(run)

    async def newest(self, tenant: str | None, limit: int) -> list[Correction]:
        def run() -> list[Correction]:
            entries = sorted((entry for _, entry in self._db.all(self._rows)), key=lambda e: -e.number)
            corrections = [entry.correction for entry in entries]
            if tenant is not None:
                corrections = [one for one in corrections if self._tenant(one) == tenant]
            return corrections[:limit]

        return await self._db.execute(run)

    def _tenant(self, correction: Correction) -> str | None:
        if correction.session is None:
            return None
        entry = self._db.get(self._db.tables.sessions, correction.session)
        return None if entry is None else entry.record.tenant

    async def share(self, session: str) -> Cost | None:
        def run() -> Cost | None:
            cost = self._db.get(self._db.tables.session_costs, session)
            if cost is not None:
                return cost
            return None if self._db.get(self._db.tables.sessions, session) is None else _NOTHING

        return await self._db.execute(run)
