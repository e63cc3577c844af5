"""The pool: the scheduler's load feedback, the autoscaler's reports, and operators' orders."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from turboserve.allocation.classes import CLASSES_LIMIT
from turboserve.contracts.autoscale import ProfileTable, ScalingStatus
from turboserve.contracts.base import Contract, Count, Id, Note, Number, Text, UnixSeconds
from turboserve.contracts.cost import Rental
from turboserve.contracts.decoding import DecodeCapacity
from turboserve.contracts.fidelity import Quality, SlackSeconds
from turboserve.contracts.loans import WorkerLoan
from turboserve.contracts.pool_history import REPORTED_DECISIONS, PoolDecision, PoolSample

WORKERS_LIMIT = 100_000
"""Maximum number of workers in one pool."""
LEARNED_LIMIT = 16_384
"""Maximum length of what a pool's autoscaler has learned, characters."""


class LoadFeedback(Contract):
    """scheduler → autoscaler, after every decision and every second: the load of one model's workers.

    Source: TurboServe, 5.2.2 (the load signal of the placement controller).
    """

    model: Id
    rho_max: float = Field(ge=0, le=1e6)
    """Largest (used + reserved) / K over all ready workers. 0 if no worker is ready."""
    required: Count
    """N_req: number of sessions that have a worker or wait for one. Those of other classes count, in slots of
    this one, where workers serve both."""
    own_required: Count | None = None
    """Number of sessions in `required` that are of this class. None: all."""
    waiting: Count
    """Number of sessions in `required` without a worker."""
    capacity: Count
    """Sum of K over all ready workers."""
    workers: Count
    """Number of ready workers."""
    quality_debt: float = Field(default=0.0, ge=0, le=1)
    """Share of the chunks of the last minute that were below the best configuration because of their worker's
    load, over all workers."""
    deficit: float = Field(default=0.0, ge=0, le=1e9)
    """Expected number of late chunks within the workers' horizons, over all workers."""
    floor_capacity: Count | None = None
    """Sum of K_floor over all ready workers. None: as `capacity`."""
    decoding: DecodeCapacity | None = None
    """The workers' decode workers. None: no worker has any."""
    borrowing: Count = 0
    """Number of workers that borrow another worker's device, since a session of theirs would be late."""
    decisions: Count = 0
    """Number of placements by this scheduler process. A smaller number than before means a restart."""
    at: UnixSeconds = 0.0


class PoolMemberPhase(StrEnum):
    """The state of a pool member, from vacant to serving."""

    VACANT = "vacant"
    RESERVING = "reserving"
    LAUNCHING = "launching"
    """The worker's process was started, and has not registered yet."""
    LOADING = "loading"
    """The worker has registered and loads its model."""
    READY = "ready"
    DRAINING = "draining"
    RELEASING = "releasing"
    BACKING_OFF = "backing_off"
    """The worker failed. The next attempt follows in `retry_in_s`."""


class MemberPlayout(Contract):
    """The playout slack of a worker's running sessions, by its newest load report."""

    slack_s: SlackSeconds | None = None
    """Least playout slack. None: no session runs."""
    credit_s: SlackSeconds | None = None
    """Least service credit. None: no session runs."""
    urgent: Count = 0
    """Number of sessions in this tier, and so on."""
    normal: Count = 0
    relaxed: Count = 0
    lowered: Count = 0
    """Number of sessions whose newest chunk is below the best configuration."""
    quality: Quality | None = None
    """Mean quality of the chunks of the last minute. None: no chunk, or not measured."""
    loan: WorkerLoan | None = None
    """The loan under way. None: the worker neither borrows nor lends."""


class PoolMemberStatus(Contract):
    """A worker's place in the pool, and the worker in it."""

    member: Id
    phase: PoolMemberPhase
    wanted: bool = True
    """Whether the pool's size includes this member. A member that is not wanted drains."""
    worker: Id | None = None
    pid: Count | None = None
    since: UnixSeconds = 0.0
    """When this phase began."""
    sessions: Number = 0
    """Number of sessions that hold a slot of this worker."""
    suspended: Number = 0
    """Number of sessions whose state is in this worker's host memory."""
    failures: Number = 0
    """Number of failures in a row."""
    retry_in_s: float | None = None
    reason: Note | None = None
    """Why the member is in this phase."""
    playout: MemberPlayout | None = None
    """None: the worker has not reported yet."""
    models: Annotated[tuple[Id, ...], Field(max_length=CLASSES_LIMIT)] = ()
    """Models that a worker of the member serves. Empty: not known, as from an earlier version."""


class PoolAction(Contract):
    """An action of the autoscaler, and its reason."""

    at: UnixSeconds
    member: Id | None = None
    worker: Id | None = None
    action: Text
    """One of target, launch, adopt, ready, drain, extend, release, gone, fail."""
    reason: Note


class PoolStatus(Contract):
    """autoscaler → gateway, scheduler, every second and at once on a change: the pool, for operators."""

    provider: Text
    pool: Id = "local"
    model: Id | None = None
    """Model that the pool's workers serve. None: an autoscaler of an earlier version."""
    absorbs: bool = False
    """Whether workers may hold more than K sessions, up to K_floor, since capacity is on its way."""
    target: Number | None = None
    """Number of workers wanted. None: another system starts the workers."""
    ready: Number = 0
    starting: Number = 0
    draining: Number = 0
    members: tuple[PoolMemberStatus, ...] = ()
    actions: tuple[PoolAction, ...] = ()
    """The newest actions, newest last."""
    reason: Note | None = None
    """Why the pool is not as wanted. None: it is as wanted."""
    scaling: ScalingStatus | None = None
    """The controller's status. None: another system starts the workers."""
    orders: Number | None = None
    """Version of the orders in force. None: no answer of the state store yet, and hence no decisions."""
    provider_error: Note | None = None
    """Error of the provider. None: no error."""
    start_up_s: float | None = None
    """Time from launch to ready of the newest ready worker, seconds. None: no worker has become ready yet."""
    at: UnixSeconds = 0.0


class PoolReport(Contract):
    """autoscaler → state store, every second: size limit and workers. Answered with `PoolOrders`."""

    pool: Id
    model: Id
    maximum: int = Field(default=0, ge=0, le=WORKERS_LIMIT)
    """Number of workers that the pool starts by itself. Sessions are admitted to wait for these workers.
    0: another system starts the workers, and a session is admitted only to a free slot."""
    absorbs: bool = False
    """Whether workers may hold more than K sessions, up to K_floor, until more capacity has come."""
    absorbs_at_maximum: bool = False
    """Whether they may also at the pool's maximum, so that admission counts on K_floor."""
    decode_sessions: Count | None = None
    """Sessions that the decode workers of the model's workers carry, and those that its workers with both
    roles may have. Workers that the pool may still start bring slots for no more. None: no decode workers
    limit them, or none is known."""
    process: Id | None = None
    """Id of the reporting process, whose monotonic clock measures the ages in `rentals`. None: a process of
    an earlier version."""
    pool_term: Count | None = None
    """The term of the pool's leader, if several autoscalers share the pool. Refused with `stale_term`. None:
    no other autoscaler shares it."""
    rentals: tuple[Rental, ...] | None = None
    """All current workers, and ended workers whose end no answer has acknowledged. None: not known yet."""
    learned: Text | None = Field(default=None, max_length=LEARNED_LIMIT)
    """What the autoscaler has learned from the pool's demand, for its next process. Only the autoscaler knows
    the format. None: as stored."""
    recalls: bool = False
    """Whether the answer shall have what was stored as `learned`: the process has just started."""
    sample: PoolSample | None = None
    """The pool's state now, for its history. None: an earlier version."""
    decisions: Annotated[tuple[PoolDecision, ...], Field(max_length=REPORTED_DECISIONS)] = ()
    """Decisions that no answer has acknowledged, oldest first."""


class PoolOrders(Contract):
    """The orders of operators for one pool: its row. The state store keeps it over restarts."""

    pool: Id
    version: Number = 0
    """Raised by every change. 0: no order yet."""
    override: int | None = Field(default=None, ge=0, le=WORKERS_LIMIT)
    """Fixed number of workers, independent of the load. None: the controller decides."""
    dry_run: bool | None = None
    """Whether the controller only reports what it would do. None: as in the autoscaler's settings."""
    table: ProfileTable | None = None
    """Profiled parameters. None: the autoscaler's default table."""
    learned: Text | None = Field(default=None, max_length=LEARNED_LIMIT)
    """`learned` of an earlier report. Only in the answer to a report that `recalls` it."""


class OrderPool(Contract):
    """gateway → state store: change the orders. Answered with `PoolOrders`.

    Refused with `not_found` for a pool that has never reported.
    """

    pool: Id
    change: tuple[Literal["override", "dry_run", "table"], ...] = Field(max_length=3)
    """Names of the fields below to change. Empty: change nothing, and only return the orders."""
    override: int | None = Field(default=None, ge=0, le=WORKERS_LIMIT)
    dry_run: bool | None = None
    table: ProfileTable | None = None
