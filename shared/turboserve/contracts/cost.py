"""What workers cost: who reports it, and how it is told."""

from __future__ import annotations

from pydantic import Field

from turboserve.contracts.base import Contract, Id, UnixSeconds


class Rental(Contract):
    """autoscaler → state store, in every report: one worker for as long as its place is paid for."""

    worker: Id
    slot: Id | None = None
    kind: str | None = Field(default=None, max_length=64)
    """What it runs on, as prices name it; None: the device that the worker itself will name."""
    gpus: float = Field(default=1.0, ge=0, le=1_024)
    age_s: float = Field(ge=0)
    """How long ago it was launched."""
    ready_ago_s: float | None = Field(default=None, ge=0)
    """How long ago it became ready; None: it is not, or nobody here has seen it."""
    ended_ago_s: float | None = Field(default=None, ge=0)
    """How long ago it ended; None: it is there."""


class GetCost(Contract):
    """gateway → state store. `tenant` None is for services, which see every session."""

    tenant: Id | None = None
    session: Id | None = None
    """Only this one's share; None: the newest `limit`."""
    limit: int = Field(default=100, ge=1, le=1_000)


class Cost(Contract):
    """An amount. Money is in the report's currency."""

    gpu_seconds: float
    money: float


class KindCost(Cost):
    """All workers of one kind."""

    kind: str
    price_per_gpu_hour: float
    """As it is set now; money was counted at the price of its time."""
    workers: int
    running: int
    starting_gpu_seconds: float
    """Of the GPU-seconds, those from a launch to its worker being ready (or ended)."""


class PoolCost(Cost):
    """All workers of one pool; `pool` None: workers that no pool started."""

    pool: str | None = None


class SessionCost(Cost):
    """A session's share of its workers' time: each second of a worker is split evenly among the sessions
    that hold a slot on it; a second in which nobody does is nobody's, and counts as idle."""

    session: Id
    model: Id
    phase: str


class CostReport(Contract):
    """What everything has cost since the first worker. `total` = `used` + `idle`."""

    currency: str
    since: UnixSeconds | None = None
    """When the first worker was launched; None: there was none."""
    total: Cost
    used: Cost
    """Sessions' shares, of all tenants."""
    idle: Cost
    """Starting workers, and workers on which no session held a slot."""
    kinds: tuple[KindCost, ...] = ()
    pools: tuple[PoolCost, ...] = ()
    sessions: tuple[SessionCost, ...] = ()
    at: UnixSeconds
