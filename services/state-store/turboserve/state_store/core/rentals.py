"""What a worker is paid for: seconds that a process has measured by its monotonic clock. One row per worker.

A pool's report says how long its worker has been there by the pool's own process. Only what exceeds the span
that this process had reported before is added, so a report that comes twice, late, or again after a crash
adds nothing. Wall clocks are used where no monotonic clock reaches, between two processes: for `BRIDGE_S` at
most, and marked as estimated.
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
BRIDGE_S = 300.0
"""Seconds at most that are taken from wall clocks where no process has measured."""
FORMER_KEPT = 16
"""Processes of a pool that are remembered as replaced."""


@dataclass(frozen=True)
class ClockReading:
    """One instant as one process of the state store sees it."""

    process: str
    """Which process: its monotonic clock means nothing to another."""
    monotonic: float
    """Seconds."""
    wall: float
    """Unix seconds."""


@dataclass(frozen=True)
class RentalRow:
    """One rental. Times at which something was are Unix seconds, for people and for estimates alone.

    0 ≤ `starting_s`, `estimated_s`, `accrued_s` ≤ `paid_s`, and none of them ever shrinks.
    """

    worker: str
    pool: str | None
    slot: str | None
    kind: str
    gpus: float
    price_hour: float
    """Money per GPU and hour."""
    started_at: float
    seen_at: float
    """When it was last reported, or the worker's own last renewal where no pool reports it."""
    ended_at: float | None
    ready: bool
    """Whether it has ever been ready."""
    paid_s: float
    """Seconds that are paid for."""
    starting_s: float
    """Of these, seconds before it was ready."""
    estimated_s: float
    """Of these, seconds that no monotonic clock has measured."""
    accrued_s: float
    """Of these, seconds of which the sessions on it have been given their shares."""
    source: str | None
    """Process of the pool that reported last; None: no pool reports it."""
    source_s: float
    """The longest span that `source` has reported."""
    meter: str
    """Process of the state store that counted last..."""
    meter_s: float
    """...and the instant up to which it counted, by its monotonic clock."""

    @property
    def gpu_seconds(self) -> float:
        return self.paid_s * self.gpus


def price_of(kind: str, prices: Mapping[str, float]) -> float:
    """Money per GPU and hour; 0 where nobody has set a price."""
    return prices.get(kind, prices.get(ANY_KIND, 0.0))


def take_over(
    current: str | None, former: tuple[str, ...], process: str
) -> tuple[str, tuple[str, ...]] | None:
    """A pool's current and former processes after a report of `process`.

    None: the process was replaced, and spans that it still reports are not counted beside its successor's.
    """
    if process == current:
        return process, former
    if process in former:
        return None
    return process, (*former, *([current] if current is not None else []))[-FORMER_KEPT:]


def reported(
    row: RentalRow | None,
    pool: str,
    process: str,
    rental: Rental,
    prices: Mapping[str, float],
    now: ClockReading,
) -> RentalRow:
    """The row after the pool's process `process` has reported."""
    ended_ago = min(rental.ended_ago_s or 0.0, rental.age_s)
    span = rental.age_s - ended_ago
    kind = rental.kind or (row.kind if row is not None else UNKNOWN)
    price = row.price_hour if row is not None and row.kind == kind else price_of(kind, prices)
    ended = None if rental.ended_ago_s is None else max(now.wall - ended_ago, 0.0)
    if row is None:
        row = RentalRow(
            worker=rental.worker,
            pool=pool,
            slot=rental.member,
            kind=kind,
            gpus=rental.gpus,
            price_hour=price,
            started_at=max(now.wall - rental.age_s, 0.0),
            seen_at=now.wall,
            ended_at=None,
            ready=False,
            paid_s=0.0,
            starting_s=0.0,
            estimated_s=0.0,
            accrued_s=0.0,
            source=process,
            source_s=0.0,
            meter=now.process,
            meter_s=now.monotonic - rental.age_s,
        )
    new = row.source != process
    if not new:
        added, estimated = max(span - row.source_s, 0.0), 0.0
    else:
        gap, estimated = gap_before(row, now.monotonic - rental.age_s, now.wall - rental.age_s, now.process)
        added = max(span + gap, 0.0)
        row = replace(row, source=process, source_s=0.0)
    # Of what is added, the end is what the report's own times count back from.
    since_ready = None if rental.ready_ago_s is None else max(rental.ready_ago_s - ended_ago, 0.0)
    starting = added if since_ready is None else max(added - since_ready, 0.0)
    if row.ready:
        starting = 0.0
    # One that came before, or before a later one, must not move the instant up to which is counted.
    later = added > 0.0 or new
    return replace(
        row,
        pool=pool,
        slot=rental.member or row.slot,
        kind=kind,
        gpus=rental.gpus,
        price_hour=price,
        seen_at=now.wall if later else row.seen_at,
        ended_at=_end(row.ended_at, ended, later),
        ready=row.ready or since_ready is not None,
        paid_s=row.paid_s + added,
        starting_s=row.starting_s + starting,
        estimated_s=row.estimated_s + min(estimated, added),
        source_s=max(row.source_s, span),
        meter=now.process if later else row.meter,
        meter_s=now.monotonic - ended_ago if later else row.meter_s,
    )


def _end(known: float | None, said: float | None, later: bool) -> float | None:
    """When it ended. A report that is not an old one may say that it lives: it was declared gone while its
    process, which is paid for, went on."""
    if said is None and known is not None:
        return None if later else known
    return known if known is not None else said


def gap_before(row: RentalRow, monotonic: float, wall: float, process: str) -> tuple[float, float]:
    """Seconds from where `row` has been counted up to until the given instant, and how many are estimated.

    Below 0 where that instant has been counted already: the same process of the state store knows; and what
    was paid before any pool reported the worker may lie within the pool's own span.
    """
    if row.meter == process:
        return monotonic - row.meter_s, 0.0
    if row.source is not None:
        gap = min(max(wall - row.seen_at, 0.0), BRIDGE_S)
        return gap, gap
    # The first look comes later than the renewal that it finds, and counts up to itself.
    counted_to = max(row.seen_at, row.started_at + row.paid_s)
    gap = min(max(wall - counted_to, -row.paid_s), BRIDGE_S)
    return gap, max(gap, 0.0)


def unmentioned(row: RentalRow) -> RentalRow:
    """The row of a worker that its pool, which knows all that live, does not mention: it has ended."""
    return row if row.ended_at is not None else replace(row, ended_at=max(row.started_at, row.seen_at))


def described(row: RentalRow, record: WorkerRecord, prices: Mapping[str, float]) -> RentalRow:
    """The row of a worker that a pool reports, with what only the worker knows: what it is, and that it is
    ready."""
    kind = _kind(record)
    if row.ended_at is None and row.kind == UNKNOWN and kind != UNKNOWN:
        row = replace(row, kind=kind, price_hour=price_of(kind, prices))
    if not row.ready and record.phase in (WorkerPhase.READY, WorkerPhase.DRAINING):
        row = replace(row, ready=True)
    return row


def followed(
    row: RentalRow | None, record: WorkerRecord, prices: Mapping[str, float], now: ClockReading
) -> RentalRow | None:
    """The row of a worker that no pool reports, after a look at the worker's own; None: nothing to pay for.

    It is paid for from one renewal to the next, by the clock of who looks: one process of the state store.
    """
    if row is None:
        if record.phase is WorkerPhase.GONE or record.pool_slot is not None:
            # Its pool knows since when it is there.
            return None
        before = min(max(now.wall - record.started_at, 0.0), BRIDGE_S)
        kind = _kind(record)
        return RentalRow(
            worker=record.id,
            pool=None,
            slot=None,
            kind=kind,
            gpus=1.0,
            price_hour=price_of(kind, prices),
            started_at=max(now.wall - before, 0.0),
            seen_at=record.renewed_at,
            ended_at=None,
            ready=record.phase is not WorkerPhase.STARTING,
            paid_s=before,
            starting_s=before if record.phase is WorkerPhase.STARTING else 0.0,
            estimated_s=before,
            accrued_s=0.0,
            source=None,
            source_s=0.0,
            meter=now.process,
            meter_s=now.monotonic,
        )
    if row.ended_at is not None:
        return row
    row = described(row, record, prices)
    if record.renewed_at != row.seen_at:
        gap, estimated = gap_before(row, now.monotonic, record.renewed_at, now.process)
        added = max(gap, 0.0)
        row = replace(
            row,
            seen_at=record.renewed_at,
            paid_s=row.paid_s + added,
            starting_s=row.starting_s + (0.0 if row.ready else added),
            estimated_s=row.estimated_s + min(estimated, added),
            meter=now.process,
            meter_s=now.monotonic,
        )
    if record.phase is WorkerPhase.GONE:
        row = replace(row, ended_at=max(row.started_at, now.wall))
    return row


def _kind(record: WorkerRecord) -> str:
    return record.device.partition(":")[0] or UNKNOWN
