"""The cost of workers: its reports, corrections and summary."""

from __future__ import annotations

from pydantic import Field

from turboserve.contracts.base import Contract, Id, Number, Text, UnixSeconds

LARGEST = 1e12
"""Maximum of GPU-seconds or money in one correction."""
AGE_LIMIT_S = 1e9
"""Maximum age of anything about a worker, seconds: 31 years."""


class Rental(Contract):
    """autoscaler → state store, in every report: one worker, from launch to end."""

    worker: Id
    member: Id | None = None
    kind: Text | None = Field(default=None, max_length=64)
    """Kind of hardware, as in the price list. None: the device that the worker itself will report."""
    gpus: float = Field(default=1.0, ge=0, le=1_024)
    age_s: float = Field(ge=0, le=AGE_LIMIT_S)
    """Seconds since the worker was launched or found, by the monotonic clock of the reporting process."""
    ready_ago_s: float | None = Field(default=None, ge=0, le=AGE_LIMIT_S)
    """Seconds since the worker became ready. None: not ready, or the reporting process did not see it."""
    ended_ago_s: float | None = Field(default=None, ge=0, le=AGE_LIMIT_S)
    """Seconds since the worker ended. None: it still runs."""


class GetCost(Contract):
    """gateway → state store: read the cost. `tenant` None is for services, which see every session."""

    tenant: Id | None = None
    session: Id | None = None
    """Report only the share of this session. None: the newest `limit` sessions."""
    limit: int = Field(default=100, ge=1, le=1_000)
    every_correction: bool = False
    """Whether to list the corrections of all tenants."""


class Correction(Contract):
    """An amount that an operator adds to the cost or subtracts. Only another correction undoes it."""

    id: Id
    session: Id | None = None
    """The session whose share is corrected. None: no particular session."""
    gpu_seconds: float
    money: float
    reason: Text
    by: Id
    """The tenant that made the correction."""
    at: UnixSeconds


class CorrectCost(Contract):
    """gateway → state store: an operator corrects the cost. Answered with the `Correction`.

    A repeat with a known id makes no second correction. Refused if the corrected sum would be below zero.
    """

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
    """The current price. `money` is counted at the price at the time of use."""
    workers: Number
    running: Number
    starting_gpu_seconds: float
    """The part of the GPU-seconds from a launch until the worker was ready or had ended."""
    estimated_gpu_seconds: float = 0.0
    """The part of the GPU-seconds measured by wall clocks, because no monotonic clock measured it."""


class PoolCost(Cost):
    """All workers of one pool. `pool` None: workers that no pool started."""

    pool: Text | None = None


class ModelCost(Contract):
    """The shares of the sessions of a model. `model` None: time in which no session held a slot."""

    model: Id | None = None
    gpu_seconds: float
    money: float


class SessionCost(Cost):
    """A session's share of its workers' time.

    Each second of a worker is split evenly among the sessions that hold a slot on it. A second in which no
    session holds a slot counts as idle.
    """

    session: Id
    model: Id
    phase: Text
    corrected_gpu_seconds: float = 0.0
    """GPU-seconds that corrections add to the session's share."""
    corrected_money: float = 0.0


class CostReport(Contract):
    """The whole cost since the first worker. `total` = `used` + `idle` + `corrected`."""

    currency: Text
    since: UnixSeconds | None = None
    """When the first worker was launched. None: no worker yet."""
    total: Cost
    used: Cost
    """The sum of the shares of all sessions, of all tenants."""
    idle: Cost
    """The cost of starting workers, and of workers on which no session held a slot."""
    corrected: Cost = Cost(gpu_seconds=0.0, money=0.0)
    """The sum of all corrections, of all tenants. `kinds`, `pools` and shares do not include corrections."""
    estimated_gpu_seconds: float = 0.0
    """The part of the total that no monotonic clock has measured, such as the time between two autoscalers
    during which the state store restarted as well."""
    corrections: tuple[Correction, ...] = ()
    """The newest corrections: of the tenant's sessions, or all for a caller that may make corrections."""
    kinds: tuple[KindCost, ...] = ()
    pools: tuple[PoolCost, ...] = ()
    sessions: tuple[SessionCost, ...] = ()
    at: UnixSeconds
