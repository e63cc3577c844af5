"""What a worker is paid for: from its launch until it ended, or was last seen. One row per worker.

Counting is by rows that say from when to when, never by adding up while time passes: a report that comes
twice, or again after a crash, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from turboserve.contracts.cost import Rental
from turboserve.contracts.workers import WorkerPhase, WorkerRecord

ANY_KIND = "*"
"""The price of kinds that have none of their own."""
UNKNOWN = "unknown"
"""Kind of a worker whose pool does not say, and who has not said yet, what it runs on."""


@dataclass(frozen=True)
class Row:
    """One rental. Times are wall-clock seconds; `price_hour` is money per GPU and hour."""

    worker: str
    pool: str | None
    slot: str | None
    kind: str
    gpus: float
    price_hour: float
    started_at: float
    ready_at: float | None
    seen_at: float
    ended_at: float | None
    accrued_until: float
    """Up to here the sessions on it have been given their share."""

    @property
    def until(self) -> float:
        """It is paid for up to here: its end, or the last sign of life while nobody has seen its end."""
        return max(self.started_at, self.seen_at if self.ended_at is None else self.ended_at)

    @property
    def gpu_seconds(self) -> float:
        return (self.until - self.started_at) * self.gpus


def price_of(kind: str, prices: Mapping[str, float]) -> float:
    """Money per GPU and hour; 0 where nobody has set a price."""
    return prices.get(kind, prices.get(ANY_KIND, 0.0))


def reported(row: Row | None, pool: str, rental: Rental, prices: Mapping[str, float], now: float) -> Row:
    """The row after its pool's word at wall-clock time `now`."""
    started = now - rental.age_s
    ended = None if rental.ended_ago_s is None else max(started, now - rental.ended_ago_s)
    ready = None if rental.ready_ago_s is None else now - rental.ready_ago_s
    kind = rental.kind or (row.kind if row is not None else UNKNOWN)
    price = row.price_hour if row is not None and row.kind == kind else price_of(kind, prices)
    if row is None:
        seen = now if ended is None else ended
        return Row(
            rental.worker, pool, rental.slot, kind, rental.gpus, price, started, ready, seen, ended, started
        )
    return replace(
        row,
        pool=pool,
        slot=rental.slot or row.slot,
        kind=kind,
        gpus=rental.gpus,
        price_hour=price,
        started_at=min(row.started_at, started),
        ready_at=_first(row.ready_at, ready),
        seen_at=max(row.seen_at, now) if ended is None else row.seen_at,
        # Alive again: it was declared gone while its process, which is paid for, went on.
        ended_at=None if ended is None else _first(row.ended_at, ended),
    )


def unmentioned(row: Row) -> Row:
    """The row of a worker that its pool, which knows all that live, does not mention: it has ended."""
    return row if row.ended_at is not None else replace(row, ended_at=row.until)


def followed(row: Row | None, record: WorkerRecord, prices: Mapping[str, float], now: float) -> Row | None:
    """The row after a look at the worker's own; None: nothing is known to pay for.

    It opens a rental for a worker that nobody's pool reports, and ends only such a one.
    """
    gone = record.phase is WorkerPhase.GONE
    seen = min(record.renewed_at, now)
    kind = record.device.partition(":")[0] or UNKNOWN
    if row is None:
        if gone:
            return None
        started = min(record.started_at, seen)
        ready = seen if record.phase is not WorkerPhase.STARTING else None
        return Row(
            record.id,
            None,
            record.pool_slot,
            kind,
            1.0,
            price_of(kind, prices),
            started,
            ready,
            seen,
            None,
            started,
        )
    if row.ended_at is not None:
        return row
    if row.kind == UNKNOWN:
        row = replace(row, kind=kind, price_hour=price_of(kind, prices))
    if row.ready_at is None and record.phase in (WorkerPhase.READY, WorkerPhase.DRAINING):
        row = replace(row, ready_at=seen)
    row = replace(row, seen_at=max(row.seen_at, seen))
    return unmentioned(row) if gone and row.pool is None else row


def _first(one: float | None, other: float | None) -> float | None:
    known = [at for at in (one, other) if at is not None]
    return min(known, default=None)
