"""Pools: what they report and cost, and what is ordered of them."""

from __future__ import annotations

import asyncio

from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.cost import Cost, CostReport, GetCost, KindCost
from turboserve.contracts.errors import NotFoundError, SessionNotFoundError, TurboServeError
from turboserve.contracts.pool import OrderPool, PoolOrders, PoolReport
from turboserve.state_store.core import rentals as rules
from turboserve.state_store.database import Database
from turboserve.state_store.repository import pools, rentals
from turboserve.state_store.settings import Settings

log = logs.get("cost")


class Pools:
    """The endpoints of pools and cost, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database, clock: Clock, settings: Settings) -> None:
        self._database, self._clock, self._settings = database, clock, settings

    async def report(self, report: PoolReport) -> PoolOrders:
        """Note who is paid for; the pool's orders."""
        now = self._clock.wall()
        async with self._database.transaction(durable=False) as db:
            if report.rentals is not None:
                await self._rentals(db, report, now)
            return await pools.reported(db, report, now)

    async def _rentals(self, db: AsyncConnection, report: PoolReport, now: float) -> None:
        await rentals.lock(db)
        said = {rental.worker: rental for rental in report.rentals or ()}
        known = await rentals.of_pool(db, report.pool, said)
        prices = self._settings.prices
        after = [rules.reported(known.get(w), report.pool, rental, prices, now) for w, rental in said.items()]
        after += [rules.unmentioned(row) for worker, row in known.items() if worker not in said]
        await rentals.put(db, after)
        # What was paid before anyone knew of the worker must not fall to who comes a moment later.
        await self._account(db, now)

    async def order(self, order: OrderPool) -> PoolOrders:
        """Change what is ordered, if anything; answered when it is on disk. Raises NotFoundError."""
        async with self._database.transaction() as db:
            before = await pools.get(db, order.pool, lock=True)
            if before is None:
                raise NotFoundError(f"there is no pool {order.pool}", field="pool")
            if not order.change:
                return before
            after = before.model_copy(
                update={name: getattr(order, name) for name in order.change} | {"version": before.version + 1}
            )
            await pools.write(db, after, order.change)
        return after

    async def cost(self, request: GetCost) -> CostReport:
        """Sums as of now. Raises SessionNotFoundError."""
        async with self._database.transaction() as db:
            kinds = await rentals.by_kind(db)
            by_pool = await rentals.by_pool(db)
            used = await rentals.used(db)
            sessions = await rentals.of_sessions(db, request.tenant, request.session, request.limit)
        if request.session is not None and not sessions:
            raise SessionNotFoundError(f"there is no session {request.session}", field="session")
        total = Cost(
            gpu_seconds=sum(kind["gpu_seconds"] for kind in kinds),
            money=sum(kind["money"] for kind in kinds),
        )
        return CostReport(
            currency=self._settings.currency,
            since=min((kind["since"] for kind in kinds), default=None),
            total=total,
            used=used,
            # Shares are given out a little later than the time they are of.
            idle=Cost(gpu_seconds=total.gpu_seconds - used.gpu_seconds, money=total.money - used.money),
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

    async def accrue(self) -> None:
        """Look at the workers once, and give sessions their shares of what has been paid since."""
        now = self._clock.wall()
        async with self._database.transaction(durable=False) as db:
            await rentals.lock(db)
            await self._account(db, now)

    async def _account(self, db: AsyncConnection, now: float) -> None:
        """Under the lock. Workers' own word comes first: no share is given at an unknown kind's price."""
        pairs = await rentals.beside_workers(db)
        after = [rules.followed(row, record, self._settings.prices, now) for row, record in pairs]
        await rentals.put(db, [row for row in after if row is not None])
        await rentals.accrue(db)

    async def accrue_forever(self) -> None:
        """By however many instances at once: what one has given out, the next finds given."""
        while True:
            try:
                await self.accrue()
            except TurboServeError as error:
                log.warning("accounting of cost waits", error=error.detail)
            await asyncio.sleep(self._settings.cost_sample_s)
