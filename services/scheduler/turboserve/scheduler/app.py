"""Putting a scheduler together, in the service runner."""

from __future__ import annotations

from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.lead import Lead, serve
from turboserve.scheduler.placement import PLACEMENTS, MinMax, MinMaxRebalancer, Weights
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.service import Runtime


async def start(runtime: Runtime, settings: SchedulerSettings) -> Lead:
    """Join the other schedulers. Raises ValueError for a lease that is out of order."""

    def core() -> Scheduler:
        rebalancer = MinMaxRebalancer(Weights(eta=settings.move_weight, moves_at_once=settings.moves_at_once))
        policy = settings.policy()
        placement = MinMax(rebalancer) if policy.rebalance else PLACEMENTS[settings.placement]()
        return Scheduler(placement, policy, rebalancer, rebalancer.links)

    return await serve(runtime, settings.leadership(), core, settings.tick_s)
