"""The pool: what the scheduler tells the autoscaler, and what the autoscaler tells everybody."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from turboserve.contracts.autoscale import ProfileTable, ScalingStatus
from turboserve.contracts.base import Contract, Count, Id, Note, Number, Text, UnixSeconds
from turboserve.contracts.cost import Rental

WORKERS_LIMIT = 100_000
"""Workers of one pool, at most."""


class LoadFeedback(Contract):
    """scheduler → autoscaler, after every decision and every second: the state of one model's workers.

    Source: TurboServe, 5.2.2 (the load signal of the placement controller).
    """

    model: Id
    rho_max: float = Field(ge=0, le=1e6)
    """Largest (used + reserved) / K over workers that are ready; 0 if there is none."""
    required: Count
    """N_req: sessions that need a worker, whether they have one or wait for one."""
    waiting: Count
    """Of these, the ones without a worker."""
    capacity: Count
    """Sum of K over workers that are ready."""
    workers: Count
    """Workers that are ready."""
    decisions: Count = 0
    """Placements this scheduler process has decided; a smaller number than before means that it restarted."""
    at: UnixSeconds = 0.0


class PoolMemberPhase(StrEnum):
    """Where a slot of the pool is between empty and serving (the design, "Scheduling")."""

    VACANT = "vacant"
    RESERVING = "reserving"
    LAUNCHING = "launching"
    """Its process was started, and nobody has heard from it yet."""
    LOADING = "loading"
    """It has registered and loads its model."""
    READY = "ready"
    DRAINING = "draining"
    RELEASING = "releasing"
    BACKING_OFF = "backing_off"
    """It failed; it is tried again at `retry_in_s`."""


class PoolMemberStatus(Contract):
    """One place in which a worker runs."""

    member: Id
    phase: PoolMemberPhase
    wanted: bool = True
    """Whether the pool's size asks for a worker here; a slot that is not wanted drains."""
    worker: Id | None = None
    pid: Count | None = None
    since: UnixSeconds = 0.0
    """When it came into this phase."""
    sessions: Number = 0
    """Sessions that hold a slot of this worker."""
    suspended: Number = 0
    """Sessions whose state is in this worker's host memory."""
    failures: Number = 0
    """Failures in a row."""
    retry_in_s: float | None = None
    reason: Note | None = None
    """Why it is where it is."""


class PoolAction(Contract):
    """Something the autoscaler did, and why."""

    at: UnixSeconds
    member: Id | None = None
    worker: Id | None = None
    action: Text
    """target, reserve, launch, adopt, ready, drain, extend, release, gone, fail."""
    reason: Note


class PoolStatus(Contract):
    """autoscaler → gateway, scheduler, every second and at once on a change: for operators."""

    provider: Text
    pool: Id = "local"
    target: Number | None = None
    """Workers wanted; None where workers are started by someone else."""
    ready: Number = 0
    starting: Number = 0
    draining: Number = 0
    members: tuple[PoolMemberStatus, ...] = ()
    actions: tuple[PoolAction, ...] = ()
    """The last ones, newest last."""
    reason: Note | None = None
    """Why the pool is not as it should be; None if it is."""
    scaling: ScalingStatus | None = None
    """The controller; None where workers are started by someone else."""
    orders: Number | None = None
    """Version of the orders in force; None: the state store has not said yet, and nothing is decided."""
    provider_error: Note | None = None
    """What the provider itself complains about; None: nothing."""
    start_up_s: float | None = None
    """How long the last worker took from its launch to being ready, seconds; None: none has yet."""
    at: UnixSeconds = 0.0


class PoolReport(Contract):
    """autoscaler → state store, every second: what the pool pays for. Answered with `PoolOrders`."""

    pool: Id
    model: Id
    maximum: int = Field(default=0, ge=0, le=WORKERS_LIMIT)
    """Workers that the pool may grow to by itself: a session is admitted to wait for one of them. 0: the pool
    does not grow, and who finds it full is refused."""
    process: Id | None = None
    """Which process reports: the ages of its rentals are by its own clock. None: an earlier version's."""
    rentals: tuple[Rental, ...] | None = None
    """Every worker that is there, and those whose end no answer has acknowledged yet; None: not known yet."""


class PoolOrders(Contract):
    """What operators have ordered of one pool: its row. Kept by the state store over every restart."""

    pool: Id
    version: Number = 0
    """Raised by every change; 0: nothing was ever ordered."""
    override: int | None = Field(default=None, ge=0, le=WORKERS_LIMIT)
    """Workers, whatever the load; None: the controller decides."""
    dry_run: bool | None = None
    """Whether the controller only says what it would do; None: as the autoscaler's settings say."""
    table: ProfileTable | None = None
    """Profiled parameters; None: those that the autoscaler ships with."""


class OrderPool(Contract):
    """gateway → state store: change what is ordered. Answered with all that is ordered now.

    Refused with `not_found` for a pool that has never reported.
    """

    pool: Id
    change: tuple[Literal["override", "dry_run", "table"], ...] = Field(max_length=3)
    """Which of the fields below are meant; none: only say what is ordered."""
    override: int | None = Field(default=None, ge=0, le=WORKERS_LIMIT)
    dry_run: bool | None = None
    table: ProfileTable | None = None
