"""The endpoints of pools and cost on the bus."""

from __future__ import annotations

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.state_store.endpoints import measured
from turboserve.state_store.service.pools import Pools


async def serve_pools(bus: Bus, pools: Pools) -> None:
    """Answer all endpoints of pools."""
    await bus.serve(subjects.REPORT_POOL, measured(subjects.REPORT_POOL.subject, pools.report))
    await bus.serve(subjects.ORDER_POOL, measured(subjects.ORDER_POOL.subject, pools.order))
    await bus.serve(subjects.CORRECT_COST, measured(subjects.CORRECT_COST.subject, pools.correct))
    await bus.serve(subjects.GET_COST, measured(subjects.GET_COST.subject, pools.cost))
