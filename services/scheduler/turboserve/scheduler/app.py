"""Assembles a scheduler, and runs it in every term in which this process leads.

Each term has its own core and view. A new leader keeps nothing of earlier terms and reads the store's rows,
so it finds a migration, or any other operation, that an earlier leader left unfinished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from turboserve.bus import LAG_LIMIT_S
from turboserve.ids import new_id
from turboserve.leadership import Leadership, Lease
from turboserve.scheduler import metrics
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.placement import (
    PLACEMENTS,
    REBALANCERS,
    Links,
    MinMax,
    MinMaxRebalancer,
    Placement,
    Rebalancer,
    Solve,
    Weights,
    solve_shares,
)
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.scheduler.shell import Shell
from turboserve.service import Runtime
from turboserve.term_leader import TermLeader

NAME = "scheduler"


class Lead(TermLeader[Shell]):
    """The leadership of this process, and the scheduler that runs while this process leads."""

    def __init__(
        self,
        runtime: Runtime,
        lease: Lease,
        make_core: Callable[[], Scheduler],
        tick_s: float,
        solve: Solve = solve_shares,
    ) -> None:
        super().__init__(runtime, NAME, Leadership(new_id("sch"), lease))
        self._make_core, self._tick_s, self._solve = make_core, tick_s, solve

    @property
    def shell(self) -> Shell | None:
        """The running scheduler; None in a standby."""
        return self.running

    @property
    def useful(self) -> bool:
        """Whether this process leads with a filled view of now, or stands by while another process leads."""
        if self.shell is not None:
            return self.shell.core.synced and self.shell.lag.seconds(self.now()) < LAG_LIMIT_S
        return self.leadership.followed

    def of_term(self, term: int) -> Shell:
        """Return the scheduler of a term that this process has won."""
        metrics.terms.add(1)
        return Shell(
            self.runtime,
            self._make_core(),
            self._tick_s,
            term,
            partial(self.leadership.leads_in, term),
            partial(self.on_leadership_lost, term),
            self._solve,
        )


async def serve(
    runtime: Runtime,
    lease: Lease,
    make_core: Callable[[], Scheduler],
    tick_s: float,
    solve: Solve = solve_shares,
) -> Lead:
    """Start this process as one of the schedulers.

    It is ready once it leads with a filled view, or has seen another leader renew.
    """
    lead = Lead(runtime, lease, make_core, tick_s, solve)
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
    lease, solve = settings.leadership(), settings.solve()
    return await serve(runtime, lease, lambda: make_core(settings), settings.tick_s, solve)
