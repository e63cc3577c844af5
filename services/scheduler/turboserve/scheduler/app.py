"""Assembles a scheduler, and runs it in every term in which this process leads.

Each term has its own core and view. A new leader keeps nothing of earlier terms and reads the store's rows,
so it finds a migration, or any other operation, that an earlier leader left unfinished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from turboserve import logs, subjects
from turboserve.contracts import leading
from turboserve.contracts.errors import StaleTermError, TurboServeError
from turboserve.ids import new_id
from turboserve.scheduler import metrics
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.leadership import Ask, Leadership, Lease, ReadLeader, RenewLead, TakeLead
from turboserve.scheduler.placement import (
    PLACEMENTS,
    REBALANCERS,
    Links,
    MinMax,
    MinMaxRebalancer,
    Placement,
    Rebalancer,
    Weights,
)
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.scheduler.shell import Shell
from turboserve.service import Runtime

NAME = "scheduler"
STEP_S = 0.05
FINAL_REPORT_TIMEOUT_S = 3.0
"""Time-out of the request to step down, in seconds. If the request fails, the next leader waits for
`leader_timeout_s`."""

log = logs.get("scheduler")


class Lead:
    """The leadership of this process, and the scheduler that runs while this process leads."""

    def __init__(
        self, runtime: Runtime, lease: Lease, make_core: Callable[[], Scheduler], tick_s: float
    ) -> None:
        self.leadership = Leadership(new_id("sch"), lease)
        self.shell: Shell | None = None
        """The running scheduler; None in a standby."""
        self._runtime, self._make_core, self._tick_s = runtime, make_core, tick_s

    @property
    def useful(self) -> bool:
        """Whether this process leads with a filled view, or stands by while another process leads."""
        if self.shell is not None:
            return self.shell.core.synced
        return self.leadership.followed

    @property
    def role(self) -> str:
        return "leader" if self.leadership.leads(self._now()) else "standby"

    async def run(self) -> None:
        """Take part in leadership until the service stops."""
        while not self._runtime.stopping.is_set():
            ask = self.leadership.tick(self._now())
            if ask is not None:
                await self._ask(ask)
            await self._follow()
            await asyncio.sleep(STEP_S)

    async def leave(self) -> None:
        """Stop the scheduler and give up the lead, so that the next leader need not wait for the time-out."""
        term, shell = self.leadership.term, self.shell
        self.shell = None
        if shell is not None:
            await shell.stop()
        if term is None:
            return
        request = leading.StepDown(name=NAME, holder=self.leadership.me, term=term)
        try:
            await self._runtime.bus.call(subjects.STEP_DOWN, request, deadline_s=FINAL_REPORT_TIMEOUT_S)
        except TurboServeError as error:
            log.info("leadership not released", error=error.detail)

    async def _ask(self, ask: Ask) -> None:
        leadership, me = self.leadership, self.leadership.me
        call = self._runtime.bus.call
        # The lease counts from the request. After a lost request, time for another one must remain.
        deadline_s = leadership.lease.lease_s / 3
        try:
            match ask:
                case ReadLeader():
                    record = await call(
                        subjects.GET_LEADER, leading.GetLeader(name=NAME), deadline_s=deadline_s
                    )
                    leadership.answered(record, self._now())
                case TakeLead(term, beat):
                    campaign = leading.Campaign(name=NAME, holder=me, term=term, beat=beat)
                    result = await call(subjects.CAMPAIGN, campaign, deadline_s=deadline_s)
                    leadership.answered(result.record, self._now(), granted=result.granted)
                case RenewLead(term):
                    keep = leading.KeepLead(name=NAME, holder=me, term=term)
                    kept = await call(subjects.KEEP_LEAD, keep, deadline_s=deadline_s)
                    leadership.answered(kept, self._now())
        except StaleTermError as error:
            log.info("another process leads", error=error.detail)
            leadership.refused(self._now())
        except TurboServeError as error:
            log.debug("campaign for leadership failed", ask=type(ask).__name__, error=error.detail)
            leadership.failed(self._now())

    async def _follow(self) -> None:
        """Stop the scheduler of a term that is over, and start one for a term that this process has won."""
        term = self.leadership.term
        if self.shell is not None and self.shell.term != term:
            log.warning("leadership lost", term=self.shell.term, instance=self.leadership.me)
            shell, self.shell = self.shell, None
            await shell.stop()
        if self.shell is None and term is not None:
            log.info("leads", term=term, instance=self.leadership.me)
            metrics.terms.add(1)
            self.shell = Shell(
                self._runtime,
                self._make_core(),
                self._tick_s,
                term,
                partial(self.leadership.leads_in, term),
                self._on_leadership_lost,
            )
            await self.shell.start()

    def _on_leadership_lost(self) -> None:
        self.leadership.on_leadership_lost(self._now())

    def _now(self) -> float:
        return self._runtime.clock.monotonic()


async def serve(runtime: Runtime, lease: Lease, make_core: Callable[[], Scheduler], tick_s: float) -> Lead:
    """Start this process as one of the schedulers.

    It is ready once it leads with a filled view, or has seen another leader renew.
    """
    lead = Lead(runtime, lease, make_core, tick_s)
    runtime.check("view", lambda: lead.useful)
    runtime.role = lambda: lead.role
    metrics.leads.add(lead, lambda lead: int(lead.role == "leader"))
    metrics.term.add(lead, _term)
    metrics.sessions_waiting.add(lead, _waiting)
    metrics.workers_known.add(lead, _workers)
    runtime.on_stop(lead.leave)
    runtime.spawn(lead.run(), "lead")
    return lead


def _term(lead: Lead) -> float:
    seen = lead.leadership.seen
    return 0 if seen is None else seen.term


def _waiting(lead: Lead) -> float | None:
    return None if lead.shell is None else lead.shell.core.waiting


def _workers(lead: Lead) -> float | None:
    return None if lead.shell is None else len(lead.shell.core.view.workers)


def core_of(settings: SchedulerSettings) -> Scheduler:
    """Build a core with an empty view."""
    weights = Weights(
        eta=settings.migration_cost_weight,
        migrations_at_once=settings.migrations_at_once,
        rescue_horizon_s=settings.rescue_horizon_s,
        tier_alpha=settings.tier_alpha,
    )
    links = Links()
    balances = settings.rebalancer == "min-max"
    rebalancer: Rebalancer = (
        MinMaxRebalancer(weights, links) if balances else REBALANCERS.make(settings.rebalancer)
    )
    policy = settings.policy()
    placement: Placement = PLACEMENTS.make(settings.placement)
    if balances and policy.rebalance:
        # Slots are kept for migrations for balance only: rescues depend on the time, and `MinMax` has none.
        placement = MinMax(MinMaxRebalancer(replace(weights, rescue_horizon_s=0.0), links))
    return Scheduler(placement, policy, rebalancer, links)


async def start(
    runtime: Runtime,
    settings: SchedulerSettings,
    make_core: Callable[[SchedulerSettings], Scheduler] = core_of,
) -> Lead:
    """Start as one of several schedulers; each term that this process leads gets a new core.

    Raises ValueError if the lease's times are out of order, and what making a core raises: a placement policy
    that cannot be imported ends the process before it becomes the leader.
    """
    make_core(settings)
    return await serve(runtime, settings.leadership(), lambda: make_core(settings), settings.tick_s)
