"""What workers cost: who reports it, and how it is told."""

from __future__ import annotations

from pydantic import Field

from turboserve.contracts.base import Contract, Id, Number, Text, UnixSeconds

LARGEST = 1e12
"""GPU-seconds or money in one correction."""
AGE_LIMIT_S = 1e9
"""How old anything about a worker may be, seconds: 31 years."""


class Rental(Contract):
    """autoscaler → state store, in every report: one worker for as long as its place is paid for."""

    worker: Id
    member: Id | None = None
    kind: Text | None = Field(default=None, max_length=64)
    """What it runs on, as prices name it; None: the device that the worker itself will name."""
    gpus: float = Field(default=1.0, ge=0, le=1_024)
    age_s: float = Field(ge=0, le=AGE_LIMIT_S)
    """How long ago it was launched or found, by the monotonic clock of the process that reports."""
    ready_ago_s: float | None = Field(default=None, ge=0, le=AGE_LIMIT_S)
    """How long ago it became ready; None: it is not, or nobody here has seen it."""
    ended_ago_s: float | None = Field(default=None, ge=0, le=AGE_LIMIT_S)
    """How long ago it ended; None: it is there."""


class GetCost(Contract):
    """gateway → state store. `tenant` None is for services, which see every session."""

    tenant: Id | None = None
    session: Id | None = None
    """Only this one's share; None: the newest `limit`."""
    limit: int = Field(default=100, ge=1, le=1_000)
    every_correction: bool = False
    """Whether corrections of all tenants are listed."""


class Correction(Contract):
    """Something that an operator adds to the cost, or takes from it. Never changed: another one undoes it."""

    id: Id
    session: Id | None = None
    """Whose share is corrected; None: nobody's in particular."""
    gpu_seconds: float
    money: float
    reason: Text
    by: Id
    """The tenant that ordered it."""
    at: UnixSeconds


class CorrectCost(Contract):
    """gateway → state store, for an operator. Answered with the `Correction`; one whose id is known is not
    made again. Refused if the sum of what is corrected would be below zero."""

    id: Id
    session: Id | None = None
    gpu_seconds: float = Field(default=0.0, ge=-LARGEST, le=LARGEST, allow_inf_nan=False)
    money: float = Field(default=0.0, ge=-LARGEST, le=LARGEST, allow_inf_nan=False)
    reason: Text = Field(min_length=1, max_length=500)
    by: Id


class Cost(Contract):
    """An amount. Money is in the report's currency."""

    gpu_seconds: float
    money: float


class KindCost(Cost):
    """All workers of one kind."""

    kind: Text
    price_per_gpu_hour: float
    """As it is set now; money was counted at the price of its time."""
    workers: Number
    running: Number
    starting_gpu_seconds: float
    """Of the GPU-seconds, those from a launch to its worker being ready (or ended)."""
    estimated_gpu_seconds: float = 0.0
    """Of the GPU-seconds, those that no monotonic clock has measured: wall clocks say how long it was."""


class PoolCost(Cost):
    """All workers of one pool; `pool` None: workers that no pool started."""

    pool: Text | None = None


class SessionCost(Cost):
    """A session's share of its workers' time: each second of a worker is split evenly among the sessions
    that hold a slot on it; a second in which nobody does is nobody's, and counts as idle."""

    session: Id
    model: Id
    phase: Text
    corrected_gpu_seconds: float = 0.0
    """What corrections add to its share."""
    corrected_money: float = 0.0


class CostReport(Contract):
    """What everything has cost since the first worker. `total` = `used` + `idle` + `corrected`."""

    currency: Text
    since: UnixSeconds | None = None
    """When the first worker was launched; None: there was none."""
    total: Cost
    used: Cost
    """Sessions' shares, of all tenants."""
    idle: Cost
    """Starting workers, and workers on which no session held a slot."""
    corrected: Cost = Cost(gpu_seconds=0.0, money=0.0)
    """The sum of all corrections, of all tenants. `kinds`, `pools` and shares are as they were measured."""
    estimated_gpu_seconds: float = 0.0
    """Of the total, GPU-seconds that no monotonic clock has measured, such as those between two autoscalers
    where the state store was started again as well."""
    corrections: tuple[Correction, ...] = ()
    """The newest: those of the tenant's sessions, or all for who may order them."""
    kinds: tuple[KindCost, ...] = ()
    pools: tuple[PoolCost, ...] = ()
    sessions: tuple[SessionCost, ...] = ()
    at: UnixSeconds
