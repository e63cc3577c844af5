"""Pools: their reports, orders and cost."""

from __future__ import annotations

import asyncio
from functools import partial

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.cost import CorrectCost, Correction, Cost, CostReport, GetCost, KindCost
from turboserve.contracts.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    SessionNotFoundError,
    TurboServeError,
)
from turboserve.contracts.pool import OrderPool, PoolOrders, PoolReport
from turboserve.contracts.pool_history import COST_S
from turboserve.contracts.usage import ListUsage, UsageDimension, UsageGroup, UsagePage
from turboserve.ids import new_id
from turboserve.state_store import metrics
from turboserve.state_store.core import rentals as rules
from turboserve.state_store.core.pool_history import step_of
from turboserve.state_store.core.tenants import day_of, hour_of
from turboserve.state_store.ports.database import Database, UnitOfWork
from turboserve.state_store.service.transactions import pool_fenced
from turboserve.state_store.settings import Settings

UNNAMED = "unnamed"
"""Process id of an autoscaler that sends none."""

MEASURE_S = 15.0
"""Interval at which the metrics of usage are set, seconds."""
MEASURED = 1_000
"""Maximum number of pairs of a tenant and a model that the metrics of usage cover."""

_MEASURED_BY = UsageDimension.TENANT, UsageDimension.MODEL

log = logs.get("cost")


class Pools:
    """The endpoints of pools and cost, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database, clock: Clock, settings: Settings) -> None:
        self._database, self._clock, self._settings = database, clock, settings
        self._process = new_id("sto")
        self._used_today: tuple[UsageGroup, ...] = ()
        for gauge, name in (
            (metrics.usage_gpu_seconds, "gpu_seconds"),
            (metrics.usage_chunks, "chunks"),
            (metrics.usage_video_time, "video_seconds"),
            (metrics.usage_viewer_time, "viewer_seconds"),
            (metrics.usage_delivered, "delivered_bytes"),
        ):
            gauge.add(self, partial(Pools.used_today, name=name))

    async def report(self, report: PoolReport) -> PoolOrders:
        """Write the pool's report, its history and its rentals. Returns the pool's orders.

        Raises StaleTermError if another autoscaler leads the pool by now.
        """
        now = self._now()
        async with self._database.transaction(durable=False) as db:
            await pool_fenced(db, report)
            if report.rentals is not None:
                await db.rentals.lock()
            orders = await db.pools.reported(report, now.wall)
            if report.sample is not None:
                await db.pool_history.add_sample(report.pool, step_of(now.wall), report.sample)
            await db.pool_history.add_decisions(report.pool, report.process or UNNAMED, report.decisions)
            if report.rentals is not None:
                await self._rentals(db, report, now)
            return orders

    async def _rentals(self, db: UnitOfWork, report: PoolReport, now: rules.ClockReading) -> None:
        """Write the rentals of a report. The caller holds the lock of rentals."""
        process = report.process or UNNAMED
        before = await db.pools.processes(report.pool)
        taken = rules.take_over(*before, process)
        if taken is None:
            log.warning("a report of a replaced autoscaler is not counted", pool=report.pool, process=process)
            return
        if taken != before:
            await db.pools.replaced(report.pool, *taken)
        said = {rental.worker: rental for rental in report.rentals or ()}
        known = await db.rentals.of_pool(report.pool, said)
        prices = self._settings.prices
        after = [
            rules.reported(known.get(worker), report.pool, process, rental, prices, now)
            for worker, rental in said.items()
        ]
        after += [rules.unmentioned(row) for worker, row in known.items() if worker not in said]
        await db.rentals.put(after)
        if any(_accrues(known.get(row.worker), row) for row in after):
            await self._account(db, None)

    def _now(self) -> rules.ClockReading:
        return rules.ClockReading(self._process, self._clock.monotonic(), self._clock.wall())

    async def order(self, order: OrderPool) -> PoolOrders:
        """Apply the changes that `order` names. Returns all orders, on disk by then. Raises NotFoundError."""
        async with self._database.transaction() as db:
            before = await db.pools.get(order.pool, lock=True)
            if before is None:
                raise NotFoundError(f"there is no pool {order.pool}", field="pool")
            if not order.change:
                return before
            after = before.model_copy(
                update={name: getattr(order, name) for name in order.change} | {"version": before.version + 1}
            )
            await db.pools.write(after, order.change)
        return after

    async def cost(self, request: GetCost) -> CostReport:
        """Return the current cost report. Raises SessionNotFoundError."""
        async with self._database.transaction() as db:
            kinds = await db.rentals.by_kind()
            by_pool = await db.rentals.by_pool()
            used = await db.rentals.used()
            sessions = await db.rentals.of_sessions(request.tenant, request.session, request.limit)
            corrected = await db.corrections.total()
            listed = await db.corrections.newest(
                None if request.every_correction else request.tenant, request.limit
            )
        if request.session is not None and not sessions:
            raise SessionNotFoundError(f"there is no session {request.session}", field="session")
        measured = Cost(
            gpu_seconds=sum(kind["gpu_seconds"] for kind in kinds),
            money=sum(kind["money"] for kind in kinds),
        )
        return CostReport(
            currency=self._settings.currency,
            since=min((kind["since"] for kind in kinds), default=None),
            total=Cost(
                gpu_seconds=measured.gpu_seconds + corrected.gpu_seconds,
                money=measured.money + corrected.money,
            ),
            used=used,
            # Shares are given shortly after the time to which they belong.
            idle=Cost(
                gpu_seconds=max(measured.gpu_seconds - used.gpu_seconds, 0.0),
                money=max(measured.money - used.money, 0.0),
            ),
            corrected=corrected,
            corrections=tuple(listed),
            estimated_gpu_seconds=sum(kind["estimated_gpu_seconds"] for kind in kinds),
            kinds=tuple(
                KindCost(
                    price_per_gpu_hour=rules.price_of(kind["kind"], self._settings.prices),
                    **{name: value for name, value in kind.items() if name != "since"},
                )
                for kind in kinds
            ),
            pools=tuple(by_pool),
            sessions=tuple(sessions),
            at=self._clock.wall(),
        )

    async def usage(self, request: ListUsage) -> UsagePage:
        """Return what tenants have used. Raises InvalidInputError."""
        async with self._database.statement() as db:
            page = await db.rentals.usage(request)
        return page.model_copy(update={"currency": self._settings.currency})

    def used_today(self, name: str) -> dict[tuple[str, ...], float]:
        """Return what the sessions of each tenant and model have used today, as it was last read."""
        return {(one.tenant or "", one.model or ""): getattr(one, name) for one in self._used_today}

    async def measure_usage(self) -> None:
        """Set the metrics of today's usage, and delete usage whose retention is over."""
        now = self._clock.wall()
        today = day_of(now)
        async with self._database.transaction(durable=False) as db:
            await db.rentals.forget_usage(day_of(max(now - self._settings.usage_retention_s, 0.0)))
            page = await db.rentals.usage(
                ListUsage(from_day=today, to_day=today, limit=MEASURED, group_by=_MEASURED_BY)
            )
        self._used_today = page.groups

    async def correct(self, request: CorrectCost) -> Correction:
        """Add a correction of the cost. A repeated request returns the correction of the first one.

        Raises InvalidInputError if the cost would become negative, SessionNotFoundError, and ConflictError if
        another correction has the id.
        """
        wanted = Correction(at=self._clock.wall(), **request.model_dump())
        async with self._database.transaction() as db:
            # Two concurrent corrections must not subtract the same time.
            await db.rentals.lock()
            share = await db.corrections.share(request.session) if request.session is not None else None
            if request.session is not None and share is None:
                raise SessionNotFoundError(f"there is no session {request.session}", field="session")
            made = await db.corrections.add(wanted)
            if made.model_copy(update={"at": wanted.at}) != wanted:
                raise ConflictError(f"the correction id {request.id} is taken", field="id")
            kinds = await db.rentals.by_kind()
            everything = Cost(
                gpu_seconds=sum(kind["gpu_seconds"] for kind in kinds),
                money=sum(kind["money"] for kind in kinds),
            )
            _check_left("the total", everything, await db.corrections.total(), request)
            if share is not None:
                _check_left(
                    "the session's share", share, await db.corrections.total(request.session), request
                )
        log.info("cost corrected", **made.model_dump(exclude={"at"}))
        return made

    async def accrue(self) -> None:
        """Look at the workers once, and give sessions their shares of the time paid since the last look."""
        async with self._database.transaction(durable=False) as db:
            await db.rentals.lock()
            # Under the lock: an instant read before it may be one that another instance has counted already.
            await self._account(db, self._now())

    async def _account(self, db: UnitOfWork, now: rules.ClockReading | None) -> None:
        """Update rentals from the workers' rows, then give shares. The caller holds the lock of rentals.

        The workers' rows come first, so that no share is given at the price of an unknown kind. `now` None:
        skip workers that no pool reports, which the instance that measures them updates.
        """
        prices, after = self._settings.prices, []
        for row, record in await db.rentals.beside_workers():
            seen = row
            if row is not None and row.pool is not None:
                seen = rules.described(row, record, prices)
            elif now is not None:
                seen = rules.followed(row, record, prices, now)
            if seen is not None and seen != row:
                after.append(seen)
        await db.rentals.put(after)
        wall = self._clock.wall()
        await db.rentals.accrue(hour_of(wall), step_of(wall, COST_S))

    async def accrue_forever(self) -> None:
        """Accrue every `cost_sample_s`; never returns.

        One instance runs this. Two that do for a moment take turns, and count no time twice: between their
        looks, wall clocks measure the workers that no pool reports.
        """
        measured_at = -MEASURE_S
        while True:
            try:
                await self.accrue()
                if self._clock.monotonic() >= measured_at + MEASURE_S:
                    measured_at = self._clock.monotonic()
                    await self.measure_usage()
            except TurboServeError as error:
                log.warning("cost accounting delayed", error=error.detail)
            await asyncio.sleep(self._settings.cost_sample_s)


def _accrues(before: rules.RentalRow | None, after: rules.RentalRow) -> bool:
    """Return whether shares are given with this report, and not at the next look.

    Sessions that come a moment later must not pay for the time before the worker was known. The last time of
    a worker that has ended belongs to the sessions that it has now. The row of a worker whose kind is not
    known may say it meanwhile, so it is read.
    """
    return before is None or before.ended_at != after.ended_at or after.kind == rules.UNKNOWN


def _check_left(what: str, measured: Cost, corrected: Cost, request: CorrectCost) -> None:
    """Raise InvalidInputError if `request` makes `measured` with all its corrections negative."""
    for field in ("gpu_seconds", "money"):
        left, change = getattr(measured, field) + getattr(corrected, field), getattr(request, field)
        if left < 0.0 and change < 0.0:
            raise InvalidInputError(
                f"{field}: {change:g} would leave {left:g} of {what}; no less than {change - left:g}",
                field=field,
                limit=f"{change - left:g}",
            )
