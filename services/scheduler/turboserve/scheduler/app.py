"""Assembles a scheduler and starts it in the service runner."""

from __future__ import annotations

from collections.abc import Callable

from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.lead import Lead, serve
from turboserve.scheduler.placement import PLACEMENTS, MinMax, MinMaxRebalancer, Weights
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.service import Runtime


def core_of(settings: SchedulerSettings) -> Scheduler:
    """Build a core with an empty view."""
    rebalancer = MinMaxRebalancer(
        Weights(eta=settings.migration_cost_weight, migrations_at_once=settings.migrations_at_once)
    )
    policy = settings.policy()
    placement = MinMax(rebalancer) if policy.rebalance else PLACEMENTS.make(settings.placement)
    return Scheduler(placement, policy, rebalancer, rebalancer.links)


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
