"""The pool and the time that a request of the console is about."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import AwareDatetime

from turboserve.contracts.base import ID_PATTERN
from turboserve.contracts.errors import InvalidInputError, NotFoundError
from turboserve.contracts.pool import OrderPool
from turboserve.contracts.pool_history import COST_S, POINTS_LIMIT, RANGE_LIMIT_S, SAMPLE_S
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.pools.endpoints import PoolId
from turboserve.gateway.pools.errors import PoolNotFoundError

EXTERNAL = "external"
"""Name of the provider whose workers another system starts."""
DEFAULT_S = 3_600.0
WANTED_POINTS = 360
"""Number of points that an answer has at most if the request names no step."""

Context = Annotated[Gateway, Depends(gateway_of)]


class KnownPool:
    """A pool that has reported to this gateway, or once to the state store."""

    def __init__(self, pool: str, *, managed: bool, model: str | None) -> None:
        self.id, self.managed, self.model = pool, managed, model


async def known_pool(pool: PoolId, gateway: Context) -> KnownPool:
    """Return the pool. Raises PoolNotFoundError."""
    try:
        status = gateway.pools.snapshot(pool).status
    except PoolNotFoundError:
        # The past of a pool is read also if its autoscaler has not reported for long.
        if re.fullmatch(ID_PATTERN, pool) is None:
            raise
        try:
            await gateway.pools.order(OrderPool(pool=pool, change=()))
        except NotFoundError:
            pass
        else:
            return KnownPool(pool, managed=True, model=None)
        raise
    return KnownPool(pool, managed=status.provider != EXTERNAL, model=status.model)


Known = Annotated[KnownPool, Depends(known_pool)]


class PastRange:
    """A range of the past of one pool."""

    def __init__(
        self,
        pool: Known,
        gateway: Context,
        since: Annotated[
            AwareDatetime | None,
            Query(
                alias="from",
                description="Begin of the range, RFC 3339 with an offset. Default: an hour before `to`.",
                examples=["2026-11-26T14:00:00Z"],
            ),
        ] = None,
        to: Annotated[
            AwareDatetime | None,
            Query(
                description="End of the range, RFC 3339 with an offset. Default: now. At most 24 h after "
                "`from`.",
                examples=["2026-11-26T15:00:00Z"],
            ),
        ] = None,
    ) -> None:
        self.pool = pool
        self.until = gateway.clock.wall() if to is None else _unix(to)
        self.since = max(self.until - DEFAULT_S, 0.0) if since is None else _unix(since)
        if self.until <= self.since:
            raise InvalidInputError("from: must be before to", field="from")
        if self.until - self.since > RANGE_LIMIT_S:
            raise InvalidInputError(
                f"from: the range has {self.until - self.since:.0f} s, more than {RANGE_LIMIT_S:.0f} s",
                field="from",
                limit=f"{RANGE_LIMIT_S:.0f} s",
            )

    @property
    def values(self) -> dict[str, Any]:
        """The fields of `contracts.pool_history.PoolRange`."""
        managed = self.pool.managed
        return {"pool": self.pool.id, "since": self.since, "until": self.until, "managed": managed}

    def step_s(self, wanted: int | None, least: int) -> int:
        """Return the length of a step: `wanted`, or one that gives `WANTED_POINTS` at most.

        Steps are multiples of `least`. Raises InvalidInputError if there are too many points.
        """
        length_s = self.until - self.since
        if wanted is None:
            return max(math.ceil(length_s / WANTED_POINTS / least), 1) * least
        if wanted < least:
            raise InvalidInputError(f"step: {wanted} s; at least {least} s", field="step", limit=least)
        if length_s / wanted > POINTS_LIMIT:
            limit = math.ceil(length_s / POINTS_LIMIT)
            raise InvalidInputError(
                f"step: {length_s / wanted:.0f} points are more than {POINTS_LIMIT}; at least {limit} s",
                field="step",
                limit=limit,
            )
        return wanted


def _unix(time: datetime) -> float:
    return max(time.timestamp(), 0.0)


Past = Annotated[PastRange, Depends()]
SampleStep = Annotated[
    int | None,
    Query(
        ge=SAMPLE_S,
        le=86_400,
        description="Length of a step, seconds. Default: so that there are at most 360 points.",
        examples=[60],
    ),
]
CostStep = Annotated[
    int | None,
    Query(
        ge=COST_S,
        le=86_400,
        description="Length of a step, seconds. Default: so that there are at most 360 points.",
        examples=[300],
    ),
]
