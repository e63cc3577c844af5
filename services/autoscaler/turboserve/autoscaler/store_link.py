"""Reports the pool's paid workers to the state store every second, and receives the pool's orders."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from turboserve import logs, subjects
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.past_decisions import PastDecisions
from turboserve.autoscaler.pool_members import PoolMember
from turboserve.autoscaler.pool_term import UNSHARED, PoolTerm
from turboserve.autoscaler.status import pool_sample
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.cost import Rental
from turboserve.contracts.errors import StaleTermError, TurboServeError
from turboserve.contracts.pool import PoolReport
from turboserve.contracts.requests import ListWorkers
from turboserve.contracts.workers import WorkerPhase
from turboserve.ids import new_id


@dataclass
class _UsageRecord:
    member: str
    kind: str | None
    gpus: float
    launched_at: float
    ready_at: float | None = None
    ended_at: float | None = None


class WorkerUsage:
    """Present workers of the pool, and ended ones whose end is not acknowledged.

    Times are the core's monotonic seconds. Reports contain ages instead, because the store has another clock.
    """

    def __init__(
        self,
        kind: str | None,
        gpus: float,
        of_offer: Callable[[str], tuple[str | None, float]] | None = None,
    ) -> None:
        """`of_offer` returns kind and GPUs of an offer's workers. None: all have `kind` and `gpus`."""
        self._of_offer = of_offer or (lambda offer: (kind, gpus))
        self._usage: dict[str, _UsageRecord] = {}
        self.start_up_s: float | None = None
        """Seconds from launch to ready of the last worker that this process launched."""

    def look(self, members: Iterable[PoolMember], now: float) -> None:
        """Note the present workers. A known worker that is not among them has ended by `now`."""
        there = set()
        for member in members:
            if member.worker is None:
                continue
            there.add(member.worker)
            usage_record = self._usage.get(member.worker)
            if usage_record is None:
                usage_record = _UsageRecord(member.name, *self._of_offer(member.offer), member.launched_at)
                self._usage[member.worker] = usage_record
            if usage_record.ready_at is None and member.ready_at is not None:
                usage_record.ready_at = member.ready_at
                if not member.adopted:
                    self.start_up_s = member.ready_at - member.launched_at
        for worker, usage_record in self._usage.items():
            if worker not in there and usage_record.ended_at is None:
                usage_record.ended_at = now

    def rentals(self, now: float) -> tuple[Rental, ...]:
        """Return the usage of all workers as of `now`."""
        return tuple(
            Rental(
                worker=worker,
                member=usage_record.member[:64],
                kind=usage_record.kind,
                gpus=usage_record.gpus,
                age_s=max(now - usage_record.launched_at, 0.0),
                ready_ago_s=None if usage_record.ready_at is None else max(now - usage_record.ready_at, 0.0),
                ended_ago_s=None if usage_record.ended_at is None else max(now - usage_record.ended_at, 0.0),
            )
            for worker, usage_record in self._usage.items()
        )

    @property
    def gpus(self) -> float:
        """GPUs of all workers that have not ended."""
        return sum((record.gpus for record in self._usage.values() if record.ended_at is None), 0.0)

    def acknowledged(self, rentals: Iterable[Rental]) -> None:
        """Forget ended workers that the store has acknowledged."""
        for rental in rentals:
            if rental.ended_ago_s is not None:
                self._usage.pop(rental.worker, None)


async def drained(bus: Bus) -> frozenset[str] | None:
    """Return the workers that drain, as the store has them. None if it does not answer."""
    try:
        page = await bus.call(subjects.LIST_WORKERS, ListWorkers())
    except (TurboServeError, ValidationError) as error:
        log.info("draining workers not known", error=_brief(error))
        return None
    return frozenset(row.id for row in page.workers if row.phase is WorkerPhase.DRAINING)


REPORT_S = 1.0
LEARNED_S = 10.0
"""Time between two reports of what was learned, seconds. A killed process loses at most this much of it."""
log = logs.get("autoscaler")


class StoreLink:
    """Sends complete reports, so that a lost report costs one second."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        pool: Pool,
        usage: WorkerUsage,
        loop: ControlLoop,
        term: PoolTerm = UNSHARED,
    ) -> None:
        self._term = term
        self._bus, self._clock = bus, clock
        self._pool, self._usage, self._loop = pool, usage, loop
        self._process = new_id("asc")
        """Id of this process, since the ages of rentals are by its clock."""
        self._past = PastDecisions()
        self.problem: str | None = None
        """Why the last report got no orders; None if it did."""
        self._learned_at = -math.inf
        """When what was learned was stored last, by the monotonic clock."""

    async def run(self) -> None:
        """Report every second. Never returns."""
        while True:
            await self.report()
            await asyncio.sleep(REPORT_S)

    async def report(self) -> None:
        """Send one report and apply the orders in the answer."""
        # Before the provider's first listing, running workers may be missing here, so report no rentals.
        now = self._clock.monotonic()
        rentals = self._usage.rentals(now) if self._pool.adopted else None
        # Before the stored state is known, this process must not overwrite it.
        recalls = self._loop.orders is None
        self._past.look(self._loop.controller.decisions, self._pool.actions, now, self._clock.wall())
        decisions = self._past.report
        due = not recalls and now - self._learned_at >= LEARNED_S
        learned = self._loop.controller.remember(self._clock.wall()) if due else None
        report = PoolReport(
            pool=self._pool.name,
            model=self._loop.model,
            maximum=self._loop.maximum,
            absorbs=self._loop.absorbs,
            absorbs_at_maximum=self._loop.controller.absorbs_at_maximum,
            decode_sessions=self._loop.decode_sessions,
            process=self._process,
            pool_term=self._term.number,
            rentals=rentals,
            learned=learned,
            recalls=recalls,
            sample=pool_sample(self._pool, self._loop.controller, now),
            decisions=decisions,
        )
        try:
            orders = await self._bus.call(subjects.REPORT_POOL, report)
        except StaleTermError as error:
            self._term.on_lost()
            self.problem = error.detail
            return
        except (TurboServeError, ValidationError) as error:
            # Unreadable orders change nothing. The orders in force remain.
            if self.problem is None:
                log.warning("stored pool orders not available", error=str(error))
            self.problem = f"stored pool orders not available: {_brief(error)}"
            return
        self.problem = None
        self._usage.acknowledged(rentals or ())
        self._past.acknowledged(decisions)
        if learned is not None:
            self._learned_at = now
        if recalls and orders.learned is not None:
            self._loop.recall(orders.learned, self._clock.wall())
        self._loop.ordered(orders, self._clock.monotonic())
        await self._report_models()

    async def _report_models(self) -> None:
        """Report how many workers may serve each further model of a pool with several offers.

        The state store has one row for each, under a name of its own, and admits sessions of the model by it.
        These rows have no leader, so a process whose term is over must not write them.
        """
        for name, (model, maximum) in self._loop.further_models.items():
            if not self._term.leads(self._clock.monotonic()):
                return
            try:
                further = PoolReport(pool=f"{self._pool.name}-{name}", model=model, maximum=maximum)
                await self._bus.call(subjects.REPORT_POOL, further)
            except (TurboServeError, ValidationError) as error:
                self.problem = f"the workers for {model} are not reported: {_brief(error)}"


def _brief(error: TurboServeError | ValidationError) -> str:
    if isinstance(error, TurboServeError):
        return error.detail
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
