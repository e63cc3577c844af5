"""The endpoints of pools and cost on the bus."""

from __future__ import annotations

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.state_store.endpoints import answering
from turboserve.state_store.service.pools import Pools


async def serve_pools(bus: Bus, clock: Clock, pools: Pools) -> None:
    """Answer all endpoints of pools."""
    await bus.serve(subjects.REPORT_POOL, answering(clock, subjects.REPORT_POOL, pools.report))
    await bus.serve(subjects.ORDER_POOL, answering(clock, subjects.ORDER_POOL, pools.order))
    await bus.serve(subjects.CORRECT_COST, answering(clock, subjects.CORRECT_COST, pools.correct))
    await bus.serve(subjects.GET_COST, answering(clock, subjects.GET_COST, pools.cost))
