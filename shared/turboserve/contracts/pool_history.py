"""The past of pools: samples, decisions, migrations, chunks of workers and cost. Who waits for a slot now.

The state store writes it, and gateways read it for operators. Ranges are of Unix time: `since` belongs to the
range, and `until` does not.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turboserve.contracts.base import NUMBER_LIMIT, Contract, Count, Id, Note, Text, UnixSeconds
from turboserve.contracts.cost import ModelCost
from turboserve.contracts.fidelity import Tier
from turboserve.contracts.sessions import Numbers
from turboserve.contracts.workers import WorkerPhase

SAMPLE_S = 10
"""Length of a step of the stored history, seconds."""
COST_S = 60
"""Length of a step of the stored cost, seconds."""
RANGE_LIMIT_S = 86_400.0
"""Maximum length of a range, seconds."""
POINTS_LIMIT = 1_440
"""Maximum number of points of one answer."""
BARS_LIMIT = 10_000
"""Number of bars after which an answer lists no further worker."""
VOLATILITY_LIMIT = 1e9
REPORTED_DECISIONS = 64
"""Maximum number of decisions in one report of a pool."""


class PoolSample(Contract):
    """The state of a pool: now in a report, or over a step of the history.

    Over a step, numbers of workers, slots and the target are the last ones. All others are the greatest ones.
    """

    ready: Count = 0
    starting: Count = 0
    draining: Count = 0
    target: Count = 0
    """Number of workers that the pool should have."""
    capacity: Count | None = None
    """Slots of all ready workers. None in this field and the next ones: no load feedback."""
    required: Count | None = None
    """Number of sessions that have a worker or wait for one."""
    waiting: Count | None = None
    """Number of sessions in `required` without a worker."""
    rho_max: float | None = Field(default=None, ge=0, le=1e6)
    """Load of the fullest worker."""
    quality_debt: float | None = Field(default=None, ge=0, le=1)
    """Share of the last minute's chunks that the load has put below the best configuration."""
    deficit: float | None = Field(default=None, ge=0, le=1e9)
    """Expected number of late chunks."""
    volatility: float | None = Field(default=None, ge=0, le=VOLATILITY_LIMIT)
    target_utilization: float | None = Field(default=None, ge=0, le=1e6)


class PoolDecision(Contract):
    """One decision about a pool: of the controller about the size, or an action on a member."""

    number: Count
    """Number of the decision in its autoscaler's process, by which a repeated report is recognized."""
    at: float = Field(ge=0, le=NUMBER_LIMIT)
    """When it was made, Unix seconds."""
    kind: Literal["scaling", "action"]
    action: Text = Field(max_length=64)
    """Of `scaling`: one of out, in, hold, override, switch, wake, limits, table. Of `action`: see
    `PoolAction`."""
    target: Count | None = None
    """Number of workers from now on. None in this field and the next two: an action."""
    previous: Count | None = None
    advice: Count | None = None
    """Number of workers that the controller wants."""
    member: Text | None = Field(default=None, max_length=64)
    worker: Text | None = Field(default=None, max_length=64)
    reason: Note
    numbers: Numbers = {}
    """The figures behind a decision of the controller."""


class StoredDecision(PoolDecision):
    """A decision as the state store has it."""

    id: Count
    """Number of the row, by which decisions at one time are told apart."""


class PoolRange(Contract):
    """What all requests about the past of a pool have."""

    pool: Id
    since: float = Field(ge=0, le=NUMBER_LIMIT)
    until: float = Field(ge=0, le=NUMBER_LIMIT)
    managed: bool = True
    """Whether an autoscaler starts the pool's workers. False: its workers are those that no pool started."""


class GetPoolHistory(PoolRange):
    """gateway → state store: read the history of a pool. Answered with `PoolHistory`."""

    step_s: int = Field(ge=SAMPLE_S, le=NUMBER_LIMIT)
    """Length of the steps of the answer, seconds."""


class PoolPoint(PoolSample):
    """A pool over one step. `at`: when the step began. Steps without a report are left out."""

    at: UnixSeconds
    chunks: Count = 0
    """Number of chunks that the pool's workers published."""
    late: Count = 0
    """Number of these chunks whose viewer had nothing left to see."""
    lowered: Count = 0
    """Number of these chunks that are below the best configuration."""


class PoolHistory(Contract):
    """The points of a range, oldest first."""

    points: tuple[PoolPoint, ...]


class ListPoolDecisions(PoolRange):
    """gateway → state store: list decisions, newest first. Answered with `PoolDecisionPage`."""

    limit: int = Field(default=100, ge=1, le=500)
    after: Count | None = None
    """The `next` of the previous page."""


class PoolDecisionPage(Contract):
    """One page of decisions. `next` None: the last page."""

    decisions: tuple[StoredDecision, ...]
    next: Count | None = None


class ListMigrations(PoolRange):
    """gateway → state store: list the migrations to the pool's workers, by their begin, newest first.

    Answered with `MigrationPage`.
    """

    limit: int = Field(default=100, ge=1, le=500)
    after: Count | None = None
    """The `next` of the previous page."""


class PastMigration(Contract):
    """One migration of a session. It is known as long as the session's row."""

    session: Id
    tenant: Id
    migration: Count
    source: Id | None = None
    """The worker that owned the session. None: not known."""
    target: Id
    reason: Note
    numbers: Numbers = {}
    """The figures behind the decision to migrate."""
    began_at: UnixSeconds
    ended_at: UnixSeconds | None = None
    """When it was committed or abandoned. None: it runs, or the session's pause, end or loss ended it."""
    outcome: Literal["running", "committed", "abandoned", "ended"]
    """`ended`: the session was paused, ended or placed anew meanwhile."""
    detail: Note = ""
    """How it ended."""


class MigrationPage(Contract):
    """One page of migrations. `next` None: the last page."""

    migrations: tuple[PastMigration, ...]
    next: Count | None = None


class ListLanes(PoolRange):
    """gateway → state store: list the workers with the chunks that they made. Answered with `LanePage`."""

    step_s: int = Field(default=0, ge=0, le=NUMBER_LIMIT)
    """0: one bar for each chunk. Else one bar for the chunks of a session that end in the same step."""
    limit: int = Field(default=50, ge=1, le=200)
    """Maximum number of workers."""
    after: Id | None = None
    """The `next` of the previous page."""


class ChunkBar(Contract):
    """Successive chunks of one session on one worker."""

    began_at: UnixSeconds
    """When the worker began to compute the first of them."""
    ended_at: UnixSeconds
    """When it published the last of them."""
    first: Count
    """Index of the first chunk."""
    chunks: Count
    late: Count = 0
    """Number of chunks whose viewer had nothing left to see."""
    lowered: Count = 0
    """Number of chunks below the best configuration."""
    tier: Tier | None = None
    """The most urgent tier of the session among these chunks. None: not known."""


class SessionLane(Contract):
    """The chunks of one session on one worker, oldest first."""

    session: Id
    tenant: Id | None = None
    """None: the session's row was deleted."""
    bars: tuple[ChunkBar, ...]


class WorkerLane(Contract):
    """One worker and the sessions for which it made chunks."""

    worker: Id
    member: Text | None = None
    phase: WorkerPhase
    """Phase now."""
    capacity: Count
    started_at: UnixSeconds
    gone_at: UnixSeconds | None = None
    sessions: tuple[SessionLane, ...] = ()


class LanePage(Contract):
    """One page of workers, by id. `next` None: the last page."""

    workers: tuple[WorkerLane, ...]
    next: Id | None = None


class GetPoolCost(PoolRange):
    """gateway → state store: read what a pool has cost, over time, by tenant and by model. Answered with
    `PastCost`."""

    step_s: int = Field(ge=COST_S, le=NUMBER_LIMIT)


class CostPoint(Contract):
    """The cost of one step. `at`: when the step began."""

    at: UnixSeconds
    gpu_seconds: float
    money: float


class TenantCost(Contract):
    """The shares of a tenant's sessions. `tenant` None: time in which no session held a slot."""

    tenant: Id | None = None
    gpu_seconds: float
    money: float


class PastCost(Contract):
    """The cost of a pool in a range. The tenants' shares and the rest add up to the points."""

    currency: Text = ""
    points: tuple[CostPoint, ...]
    tenants: tuple[TenantCost, ...]
    """The `TENANTS_LIMIT` largest ones, largest first."""
    models: tuple[ModelCost, ...] = ()
    """The same by model. A state store of an earlier version sends none."""


TENANTS_LIMIT = 500


class ListWaiting(Contract):
    """gateway → state store: list what waits for a slot, longest first. Answered with `WaitingPage`."""

    model: Id | None = None
    """None: all models."""
    limit: int = Field(default=100, ge=1, le=500)


class WaitingSession(Contract):
    """A session without a slot that wants one."""

    session: Id
    tenant: Id
    model: Id
    since: UnixSeconds
    """When it requested the slot."""
    weight: float
    reason: Note | None = None
    """Why it waits, by the scheduler's newest decision. None: no decision yet."""


class WaitingPage(Contract):
    """The longest waiting sessions, and the number of all."""

    sessions: tuple[WaitingSession, ...]
    total: Count
