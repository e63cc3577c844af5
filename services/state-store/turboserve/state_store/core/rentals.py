"""The time for which a worker is paid, measured by monotonic clocks. One row per worker.

A pool's report contains how long a worker has existed, by the clock of the pool's process. Only what exceeds
the span that this process reported before is added, so that a report that is repeated or late adds nothing.
Between two processes, where no monotonic clock measures, wall clocks are used: for at most `BRIDGE_S`, and
marked as estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from turboserve.contracts.cost import Rental
from turboserve.contracts.worker_offers import PRICE_LIMIT, WorkerPrice
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.static_frozen import statically_frozen

ANY_KIND = "*"
"""Key of the price of kinds without their own price."""
UNKNOWN = "unknown"
"""Kind of a worker whose device neither its pool nor the worker itself has reported."""
BRIDGE_S = 300.0
"""Maximum seconds taken from wall clocks where no process has measured."""
FORMER_KEPT = 16
"""Number of a pool's replaced processes that are remembered."""


@dataclass(frozen=True)
class ClockReading:
    """One instant, by the clocks of one process of the state store."""

    process: str
    """Id of the process. Its monotonic clock has no meaning in another process."""
    monotonic: float
    """Monotonic time, seconds."""
    wall: float
    """Wall-clock time, Unix seconds."""


@statically_frozen()
class RentalRow:
    """One rental. Points in time are Unix seconds, used only for display and estimates.

    0 ≤ `starting_s`, `estimated_s`, `accrued_s` ≤ `paid_s`. None of these ever decreases.
    """

    worker: str
    pool: str | None
    member: str | None
    kind: str
    gpus: float
    price_hour: float
    """Money per GPU and hour."""
    started_at: float
    seen_at: float
    """Time of the last report, or the worker's last renewal if no pool reports it."""
    ended_at: float | None
    ready: bool
    """Whether the worker has ever been ready."""
    paid_s: float
    """Seconds that are paid for."""
    starting_s: float
    """Paid seconds before the worker was ready."""
    estimated_s: float
    """Paid seconds that no monotonic clock has measured."""
    accrued_s: float
    """Paid seconds whose shares the worker's sessions have been given."""
    source: str | None
    """Process of the pool that reported last; None: no pool reports the worker."""
    source_s: float
    """The longest span that `source` has reported, seconds."""
    meter: str
    """Process of the state store that counted last."""
    meter_s: float
    """Instant up to which `meter` counted, by the monotonic clock of `meter`, seconds."""

    @property
    def gpu_seconds(self) -> float:
        return self.paid_s * self.gpus


def price_of(kind: str, prices: Mapping[str, float]) -> float:
    """Return the money per GPU and hour; 0 if no price is set."""
    return prices.get(kind, prices.get(ANY_KIND, 0.0))


@dataclass(frozen=True)
class Pricing:
    """What workers cost, by the settings of these names."""

    prices: Mapping[str, float]
    currency: str

    def of(self, row: RentalRow | None, record: WorkerRecord) -> WorkerPrice | None:
        """Return what a worker costs now; None if no price is set for its kind.

        `row`: its rental. None: nothing has been paid for it yet, and its own kind decides.
        """
        kind = _kind(record) if row is None else row.kind
        hour = price_of(kind, self.prices) if row is None else row.price_hour * row.gpus
        return (
            WorkerPrice(kind=kind, per_hour=min(hour, PRICE_LIMIT), currency=self.currency) if hour else None
        )


def take_over(
    current: str | None, former: tuple[str, ...], process: str
) -> tuple[str, tuple[str, ...]] | None:
    """Return a pool's current and former processes after a report of `process`.

    None: the process was replaced. Its reports do not count, since its successor reports the same time.
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
    """Return the row after the pool's process `process` has reported."""
    ended_ago = min(rental.ended_ago_s or 0.0, rental.age_s)
    span = rental.age_s - ended_ago
    kind = rental.kind or (row.kind if row is not None else UNKNOWN)
    price = row.price_hour if row is not None and row.kind == kind else price_of(kind, prices)
    ended = None if rental.ended_ago_s is None else max(now.wall - ended_ago, 0.0)
    if row is None:
        row = RentalRow(
            worker=rental.worker,
            pool=pool,
            member=rental.member,
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
    # The times of the report count back from the end of the added span.
    since_ready = None if rental.ready_ago_s is None else max(rental.ready_ago_s - ended_ago, 0.0)
    starting = added if since_ready is None else max(added - since_ready, 0.0)
    if row.ready:
        starting = 0.0
    # A repeated or late report must not move the instant up to which time is counted.
    later = added > 0.0 or new
    return replace(
        row,
        pool=pool,
        member=rental.member or row.member,
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
    """Return when the rental ended, or None.

    A current report may show a worker that lives after it was declared gone: its process, which is paid for,
    continued.
    """
    if said is None and known is not None:
        return None if later else known
    return known if known is not None else said


def gap_before(row: RentalRow, monotonic: float, wall: float, process: str) -> tuple[float, float]:
    """Return the seconds from the instant up to which `row` is counted to the given one, and those estimated.

    The result is negative if the given instant has been counted already. The same process of the state store
    measures that exactly. Time paid before any pool reported the worker may lie within the pool's own span.
    """
    if row.meter == process:
        # A worker's own row counts from the worker's start, which is later than its launch by the pool: the
        # pool's span overlaps what was paid, and nothing more.
        return max(monotonic - row.meter_s, -row.paid_s), 0.0
    if row.source is not None:
        gap = min(max(wall - row.seen_at, 0.0), BRIDGE_S)
        return gap, gap
    # The first look is later than the renewal that it finds, and counts up to the time of the look.
    counted_to = max(row.seen_at, row.started_at + row.paid_s)
    gap = min(max(wall - counted_to, -row.paid_s), BRIDGE_S)
    return gap, max(gap, 0.0)


def unmentioned(row: RentalRow) -> RentalRow:
    """Return the ended row of a worker that its pool does not mention: a pool reports all live workers."""
    return row if row.ended_at is not None else replace(row, ended_at=max(row.started_at, row.seen_at))


def described(row: RentalRow, record: WorkerRecord, prices: Mapping[str, float]) -> RentalRow:
    """Add to the row of a worker that a pool reports what only the worker knows: its kind and readiness."""
    kind = _kind(record)
    if row.ended_at is None and row.kind == UNKNOWN and kind != UNKNOWN:
        row = replace(row, kind=kind, price_hour=price_of(kind, prices))
    if not row.ready and record.phase in (WorkerPhase.READY, WorkerPhase.DRAINING):
        row = replace(row, ready=True)
    return row


def followed(
    row: RentalRow | None, record: WorkerRecord, prices: Mapping[str, float], now: ClockReading
) -> RentalRow | None:
    """Return the rental of a worker that no pool reports, by the worker's own row; None: nothing to pay for.

    The time from one renewal to the next is paid, by the clock of the process of the state store that looks.
    """
    if row is None:
        if record.phase is WorkerPhase.GONE or record.pool_member is not None:
            # Its pool knows when the worker was launched.
            return None
        before = min(max(now.wall - record.started_at, 0.0), BRIDGE_S)
        kind = _kind(record)
        return RentalRow(
            worker=record.id,
            pool=None,
            member=None,
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
    return record.device_kind or UNKNOWN
