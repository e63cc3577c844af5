"""The repository of the history of pools. For its errors, see `ports.sessions`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from turboserve.contracts.cost import ModelCost
from turboserve.contracts.pool_history import (
    ListLanes,
    ListMigrations,
    ListPoolDecisions,
    ListWaiting,
    MigrationPage,
    PoolDecision,
    PoolDecisionPage,
    PoolRange,
    PoolSample,
    TenantCost,
    WaitingPage,
    WorkerLane,
)
from turboserve.state_store.core.chunk_history import ChunkRow
from turboserve.state_store.core.pool_history import ChunkCount


class HistoryTable(StrEnum):
    """The tables of the history, whose rows have a time `at`."""

    SAMPLES = "pool_samples"
    DECISIONS = "pool_decisions"
    CHUNKS = "worker_chunks"
    COSTS = "pool_costs"
    MODEL_COSTS = "pool_model_costs"


class PoolHistoryRepository(Protocol):
    async def add_sample(self, pool: str, at: int, sample: PoolSample) -> None:
        """Write the sample of the step that began at `at`, merged with what the step has."""

    async def add_decisions(self, pool: str, process: str, decisions: Sequence[PoolDecision]) -> None:
        """Write the decisions whose numbers of this process are not there yet."""

    async def add_chunks(self, rows: Iterable[ChunkRow]) -> None:
        """Write the rows, added to those of the same worker and step."""

    async def samples(self, request: PoolRange) -> list[tuple[int, PoolSample]]:
        """Return the samples of the range with their times, oldest first."""

    async def chunk_counts(self, request: PoolRange) -> list[ChunkCount]:
        """Return the chunks of the pool's workers by step, oldest first."""

    async def decisions(self, request: ListPoolDecisions) -> PoolDecisionPage: ...

    async def migrations(self, request: ListMigrations) -> MigrationPage: ...

    async def lanes(self, request: ListLanes) -> list[WorkerLane]:
        """Return the pool's workers of the range by id, without sessions: at most one more than the limit."""

    async def chunks(self, worker: str, request: PoolRange) -> list[ChunkRow]:
        """Return the rows of one worker, oldest first. Their chunks may begin before the range."""

    async def tenants(self, sessions: Collection[str]) -> Mapping[str, str]:
        """Return the tenants of those sessions whose rows there are."""

    async def costs(self, request: PoolRange) -> Mapping[int, tuple[float, float]]:
        """Return GPU-seconds and money of the pool by the minute in which they were counted."""

    async def tenant_costs(self, request: PoolRange) -> list[TenantCost]:
        """Return the largest shares of the range, largest first."""

    async def model_costs(self, request: PoolRange) -> list[ModelCost]:
        """Return the same by model."""

    async def waiting(self, request: ListWaiting) -> WaitingPage: ...

    async def oldest(self, table: HistoryTable) -> int | None:
        """Return the oldest time in the table, Unix seconds. None: the table is empty."""

    async def beyond(self, table: HistoryTable, rows: int) -> int | None:
        """Return the time of the newest row that has `rows` newer ones. None: there are not so many."""

    async def delete_before(self, table: HistoryTable, at: int) -> None:
        """Delete the rows from before this time."""
