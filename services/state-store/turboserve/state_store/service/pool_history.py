"""The history of pools: what is read of it, and what is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.pool_history import (
    BARS_LIMIT,
    COST_S,
    POINTS_LIMIT,
    RANGE_LIMIT_S,
    SAMPLE_S,
    GetPoolCost,
    GetPoolHistory,
    LanePage,
    ListLanes,
    ListMigrations,
    ListPoolDecisions,
    ListWaiting,
    MigrationPage,
    PastCost,
    PoolDecisionPage,
    PoolHistory,
    PoolRange,
    WaitingPage,
    WorkerLane,
)
from turboserve.state_store.core import chunk_history
from turboserve.state_store.core import pool_history as rules
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.pool_history import HistoryTable
from turboserve.state_store.settings import Settings

CHUNKS_LIMIT = 150_000
"""Maximum number of chunks of which one answer makes bars. Each takes this process's time."""
ROWS_A_TURN = 20
"""Number of rows after which other requests have their turn."""


class PoolHistories:
    """The endpoints of the history, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings

    async def get(self, request: GetPoolHistory) -> PoolHistory:
        """Return the points of a range. Raises InvalidInputError."""
        _check(request, request.step_s, SAMPLE_S)
        async with self._database.transaction() as db:
            samples = await db.pool_history.samples(request)
            counts = await db.pool_history.chunk_counts(request)
        return PoolHistory(points=rules.points(samples, counts, request.step_s))

    async def decisions(self, request: ListPoolDecisions) -> PoolDecisionPage:
        async with self._database.statement() as db:
            return await db.pool_history.decisions(request)

    async def migrations(self, request: ListMigrations) -> MigrationPage:
        async with self._database.statement() as db:
            return await db.pool_history.migrations(request)

    async def cost(self, request: GetPoolCost) -> PastCost:
        """Return the cost of a range over time, by tenant and by model. Raises InvalidInputError."""
        _check(request, request.step_s, COST_S)
        async with self._database.transaction() as db:
            rows = await db.pool_history.costs(request)
            tenants = await db.pool_history.tenant_costs(request)
            models = await db.pool_history.model_costs(request)
        return PastCost(
            currency=self._settings.currency,
            points=rules.cost_points(rows, request.step_s),
            tenants=tuple(tenants),
            models=tuple(models),
        )

    async def waiting(self, request: ListWaiting) -> WaitingPage:
        async with self._database.statement() as db:
            return await db.pool_history.waiting(request)

    async def lanes(self, request: ListLanes) -> LanePage:
        """Return workers with their chunks: at least one, and no further one beyond `BARS_LIMIT` bars or
        `CHUNKS_LIMIT` chunks.

        Raises InvalidInputError, also if one worker made more chunks than that.
        """
        _check(request, 0, 0)
        async with self._database.transaction() as db:
            workers = await db.pool_history.lanes(request)
            found: list[WorkerLane] = []
            bars = chunks = 0
            for worker in workers[: request.limit]:
                rows = await db.pool_history.chunks(worker.worker, _wider(request))
                made = sum(row.chunks for row in rows)
                chunks += made
                if found and (bars >= BARS_LIMIT or chunks > CHUNKS_LIMIT):
                    break
                if made > CHUNKS_LIMIT:
                    raise InvalidInputError(
                        f"from: worker {worker.worker} made {made} chunks in the range, more than "
                        f"{CHUNKS_LIMIT}; choose a shorter range",
                        field="from",
                        limit=CHUNKS_LIMIT,
                    )
                found.append(await _with_sessions(worker, rows, request))
                bars += sum(len(lane.bars) for lane in found[-1].sessions)
            tenants = await db.pool_history.tenants(
                {lane.session for worker in found for lane in worker.sessions}
            )
        page = tuple(
            worker.model_copy(
                update={
                    "sessions": tuple(
                        lane.model_copy(update={"tenant": tenants.get(lane.session)})
                        for lane in worker.sessions
                    )
                }
            )
            for worker in found
        )
        return LanePage(workers=page, next=page[-1].worker if len(workers) > len(page) and page else None)


def _wider(request: ListLanes) -> ListLanes:
    # A chunk's row is that of the step in which it was published.
    return request.model_copy(update={"since": max(request.since - SAMPLE_S, 0.0)})


async def _with_sessions(
    worker: WorkerLane, rows: Sequence[chunk_history.ChunkRow], request: ListLanes
) -> WorkerLane:
    marks: list[chunk_history.ChunkMark] = []
    for number, row in enumerate(rows):
        if number % ROWS_A_TURN == 0:
            await asyncio.sleep(0)
        marks += (
            mark for mark in chunk_history.marks(row) if request.since <= mark.published_at < request.until
        )
    lanes = tuple(chunk_history.lanes(marks, request.step_s))
    return worker.model_copy(update={"sessions": lanes})


def _check(request: PoolRange, step_s: int, least_s: int) -> None:
    """Raise InvalidInputError for a range or a step beyond the limits."""
    length_s = request.until - request.since
    if length_s <= 0:
        raise InvalidInputError("until: must be after since", field="until", limit=request.since)
    if length_s > RANGE_LIMIT_S:
        raise InvalidInputError(
            f"the range has {length_s:.0f} s, more than {RANGE_LIMIT_S:.0f} s",
            field="until",
            limit=request.since + RANGE_LIMIT_S,
        )
    if step_s and length_s / step_s > POINTS_LIMIT:
        least = max(int(length_s // POINTS_LIMIT) + 1, least_s)
        raise InvalidInputError(
            f"step_s: {length_s / step_s:.0f} points are more than {POINTS_LIMIT}; at least {least} s",
            field="step_s",
            limit=least,
        )


async def purge(database: Database, now: float, settings: Settings) -> None:
    """Delete the history whose retention is over at the Unix time `now`, and what exceeds its size."""
    for table in HistoryTable:
        chunks = table is HistoryTable.CHUNKS
        retention_s = settings.chunk_history_s if chunks else settings.pool_history_s
        async with database.transaction(durable=False) as db:
            oldest = await db.pool_history.oldest(table)
            beyond = await db.pool_history.beyond(table, settings.pool_history_rows)
        for before in rules.slices(oldest, rules.kept_from(now, retention_s, beyond)):
            async with database.transaction(durable=False) as db:
                await db.pool_history.delete_before(table, before)
