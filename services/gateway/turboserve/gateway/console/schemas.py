"""Schemas of the past of a pool in REST answers."""

from __future__ import annotations

from pydantic import Field

from turboserve.contracts.base import Note
from turboserve.contracts.fidelity import Tier
from turboserve.contracts.workers import WorkerPhase
from turboserve.gateway.public import PublicOutput, Timestamp

_NEXT = "Value of `after` for the next page. `null`: this is the last page."
_UNKNOWN = " `null`: no load feedback."


class PastPoint(PublicOutput):
    """A pool over one step: the last numbers of workers and slots, the greatest of all other values."""

    at: Timestamp = Field(description="When the step began.")
    ready: int = Field(description="Number of ready workers.", examples=[3])
    starting: int = Field(description="Number of workers that start.", examples=[1])
    draining: int = Field(description="Number of draining workers.", examples=[0])
    target: int = Field(description="Number of workers that the pool should have.", examples=[4])
    capacity: int | None = Field(description="Slots of all ready workers." + _UNKNOWN, examples=[15])
    required: int | None = Field(
        description="Number of sessions that have a worker or wait for one." + _UNKNOWN, examples=[14]
    )
    waiting: int | None = Field(description="Number of sessions without a worker." + _UNKNOWN, examples=[1])
    rho_max: float | None = Field(description="Load of the fullest worker." + _UNKNOWN, examples=[0.95])
    quality_debt: float | None = Field(
        description="Share of the last minute's chunks that the load has lowered." + _UNKNOWN, examples=[0.02]
    )
    deficit: float | None = Field(description="Expected number of late chunks." + _UNKNOWN, examples=[0.0])
    volatility: float | None = Field(description="Volatility of the load. `null`: unknown.", examples=[0.8])
    target_utilization: float | None = Field(description="ρ̂ in force. `null`: unknown.", examples=[0.75])
    chunks: int = Field(description="Number of chunks that the pool's workers published.", examples=[187])
    late: int = Field(
        description="Number of these chunks whose viewer had nothing left to see.", examples=[0]
    )
    lowered: int = Field(
        description="Number of these chunks that are below the best configuration.", examples=[4]
    )


class PastPointList(PublicOutput):
    """The past of a pool, oldest point first."""

    step_s: int = Field(description="Length of a step, seconds.", examples=[10])
    points: list[PastPoint] = Field(description="The points.")


class PastDecision(PublicOutput):
    """A decision of the controller, or an action of the autoscaler."""

    id: int = Field(description="Number of the decision among all that are stored.", examples=[1024])
    at: Timestamp = Field(description="When it was made.")
    kind: str = Field(
        description="`scaling`: the controller about the size. `action`: the autoscaler on a member.",
        examples=["scaling"],
    )
    action: str = Field(
        description="Of `scaling`: `out`, `in`, `hold`, `override`, `wake`, `limits`, `table`. Of `action`: "
        "as in `actions` of the pool.",
        examples=["out"],
    )
    target: int | None = Field(description="Number of workers from then on. `null`: an action.", examples=[4])
    previous: int | None = Field(description="The target before. `null`: an action.", examples=[3])
    advice: int | None = Field(
        description="Number of workers that the controller wants. `null`: an action.", examples=[4]
    )
    member: str | None = Field(description="The pool member concerned, if any.", examples=[None])
    worker: str | None = Field(description="The worker concerned, if any.", examples=[None])
    reason: Note = Field(
        description="The reason, in words.",
        examples=["load 0.95 is above 0.75 + 0.1: ⌈14 / (5 × 0.75)⌉ = 4 workers"],
    )
    numbers: dict[str, float] = Field(
        description="The figures behind a decision of the controller.",
        examples=[{"rho_max": 0.95, "required": 14}],
    )


class PastDecisionList(PublicOutput):
    """A page of decisions, newest first."""

    decisions: list[PastDecision] = Field(description="The decisions.")
    next: int | None = Field(description=_NEXT, examples=[1024])


class PastMigration(PublicOutput):
    """A migration of a session to another worker."""

    session: str = Field(description="Id of the session.", examples=["ses_5f3a9c"])
    tenant: str = Field(description="Tenant of the session.", examples=["acme"])
    migration: int = Field(description="Number of the migration, unique for the session.", examples=[7])
    source: str | None = Field(
        description="The worker that owned the session. `null`: unknown.", examples=["wk_5f3a9c"]
    )
    target: str = Field(description="The worker that was to get it.", examples=["wk_77d1e0"])
    reason: Note = Field(description="Why the scheduler began it.", examples=["balance: gain 0.12 s"])
    numbers: dict[str, float] = Field(
        description="The figures behind the decision.", examples=[{"gain_s": 0.12, "cost_s": 0.01}]
    )
    began_at: Timestamp = Field(description="When it began.")
    ended_at: Timestamp | None = Field(
        description="When it was committed or abandoned. `null`: it runs, or the session ended it."
    )
    outcome: str = Field(
        description="`running`, `committed`, `abandoned`, or `ended`: the session was paused, ended or "
        "placed anew meanwhile.",
        examples=["committed"],
    )
    detail: Note = Field(
        description="How it ended. Empty: unknown.",
        examples=["state verified on the target, migration 7"],
    )


class PastMigrationList(PublicOutput):
    """A page of migrations, newest first."""

    migrations: list[PastMigration] = Field(description="The migrations.")
    next: int | None = Field(description=_NEXT, examples=[1024])


class ChunkBar(PublicOutput):
    """Successive chunks of one session on one worker."""

    began_at: Timestamp = Field(description="When the worker began to compute the first of them.")
    ended_at: Timestamp = Field(description="When it published the last of them.")
    first: int = Field(description="Index of the first chunk.", examples=[120])
    chunks: int = Field(description="Number of chunks.", examples=[1])
    late: int = Field(description="Number of chunks whose viewer had nothing left to see.", examples=[0])
    lowered: int = Field(description="Number of chunks below the best configuration.", examples=[0])
    tier: Tier | None = Field(
        description="The most urgent tier of the session among them. `null`: unknown.", examples=["relaxed"]
    )


class SessionLane(PublicOutput):
    """The chunks of one session on one worker, oldest first."""

    session: str = Field(description="Id of the session.", examples=["ses_5f3a9c"])
    tenant: str | None = Field(
        description="Tenant of the session. `null`: the session was deleted.", examples=["acme"]
    )
    bars: list[ChunkBar] = Field(description="The chunks.")


class WorkerLane(PublicOutput):
    """One worker with its sessions."""

    worker: str = Field(description="Id of the worker.", examples=["wk_5f3a9c"])
    member: str | None = Field(description="Its place in the pool, if any.", examples=["local-0"])
    phase: WorkerPhase = Field(description="Its phase now.", examples=["ready"])
    capacity: int = Field(description="Number of sessions that it holds at once.", examples=[5])
    started_at: Timestamp = Field(description="When the worker started.")
    gone_at: Timestamp | None = Field(description="When it was declared gone. `null`: it is there.")
    sessions: list[SessionLane] = Field(description="Sessions for which it made chunks in the range.")


class WorkerLaneList(PublicOutput):
    """A page of workers, by id."""

    step_s: int = Field(description="Length of a bar, seconds. 0: each chunk has its own.", examples=[0])
    workers: list[WorkerLane] = Field(description="The workers.")
    next: str | None = Field(description=_NEXT, examples=["wk_77d1e0"])
