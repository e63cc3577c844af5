"""The messages of an autoscaler, published by a test with an autoscaler's permissions."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

import httpx

from turboserve import subjects
from turboserve.bus import Bus
from turboserve.contracts.autoscale import ScalingStatus
from turboserve.contracts.cost import Rental
from turboserve.contracts.pool import PoolOrders, PoolReport, PoolStatus

LIMIT_S = 120.0
SCALING = ScalingStatus(
    mode="auto",
    target=1,
    advice=1,
    least=1,
    most=4,
    volatility=0.5,
    level=1,
    latency_weight=0.2,
    target_utilization=0.8,
    stale=False,
)


class ReportingAutoscaler:
    """Publishes reports of pools. `api` is a client of the gateway that receives them."""

    def __init__(self, bus: Bus, api: httpx.AsyncClient) -> None:
        self.bus, self.api = bus, api

    async def publish(self, pool: str, **status: Any) -> None:
        """Publish a status and wait until the gateway has received it."""
        # Milliseconds, as in the gateway's answers, and a new one for every call.
        at = round(time.time(), 3)
        values = {"provider": "local", "target": 1, "ready": 1, "orders": 0, "scaling": SCALING, **status}
        message = PoolStatus(pool=pool, at=at, **values)
        deadline = time.monotonic() + LIMIT_S
        while await self._reported_at(pool) != at:
            assert time.monotonic() < deadline, "the gateway does not receive it"
            await self.bus.publish(subjects.POOL, pool, message)
            await asyncio.sleep(0.05)

    async def _reported_at(self, pool: str) -> float | None:
        answer = await self.api.get(f"/v1/pools/{pool}")
        if answer.status_code != 200:
            return None
        written: str = answer.json()["reported_at"]
        assert written.endswith("Z")
        return round(datetime.fromisoformat(written).timestamp(), 3)

    async def report(self, pool: str, *rentals: Rental, **more: Any) -> PoolOrders:
        """Report a pool to the state store, which answers with its orders."""
        report = {"pool": pool, "model": "toyworld", "rentals": rentals, **more}
        return await self.bus.call(subjects.REPORT_POOL, PoolReport.model_validate(report))
