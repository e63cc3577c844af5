"""Schemas of pools and their orders in REST requests and answers."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from turboserve.contracts.base import Note
from turboserve.contracts.loans import LoanRole
from turboserve.contracts.pool import WORKERS_LIMIT, PoolMemberPhase, PoolOrders
from turboserve.gateway.pools.profile_schemas import Profile
from turboserve.gateway.pools.scaling_schemas import PoolScaling
from turboserve.gateway.pools.snapshots import PoolSnapshot
from turboserve.gateway.pools.summary import summary
from turboserve.gateway.public import PublicInput, PublicOutput, Timestamp


class MemberLoan(PublicOutput):
    """A loan between two workers of one host, which compute the forwards of one session together."""

    role: LoanRole = Field(
        description="`home`: the worker has the session, and borrows. `donor`: it lends its device.",
        examples=["donor"],
    )
    peer: str = Field(description="Id of the other worker.", examples=["wk_81c40b"])


class MemberPlayout(PublicOutput):
    """How urgent the sessions of a worker are, by its newest report."""

    slack_s: float | None = Field(
        description="Least playout slack of a running session, seconds. `null`: none runs.", examples=[1.9]
    )
    credit_s: float | None = Field(
        description="Least service credit of a running session, seconds. `null`: none runs.", examples=[1.5]
    )
    urgent: int = Field(description="Number of sessions in the tier `urgent`.", examples=[0])
    normal: int = Field(description="Number of sessions in the tier `normal`.", examples=[1])
    relaxed: int = Field(description="Number of sessions in the tier `relaxed`.", examples=[2])
    lowered: int = Field(
        description="Number of sessions whose newest chunk is below the best quality.", examples=[0]
    )
    quality: float | None = Field(
        description="Mean quality of the chunks of the last minute, where 1 is the best. `null`: no chunk, "
        "or not measured.",
        examples=[0.99],
    )
    loan: MemberLoan | None = Field(
        description="The loan under way. `null`: the worker neither borrows nor lends.", examples=[None]
    )


class PoolMember(PublicOutput):
    """A worker's place in the pool, and the worker in it."""

    member: str = Field(
        description="Name of the pool member. A worker that no pool started is listed under the name in its "
        "`TURBOSERVE_POOL_MEMBER`, or else under its id.",
        examples=["local-0"],
    )
    phase: PoolMemberPhase = Field(
        description="`launching`: started, not registered yet. `loading`: registered, loads its model. "
        "`backing_off`: failed, retried after `retry_in_s`.",
        examples=["ready"],
    )
    wanted: bool = Field(
        description="Whether the pool's size includes this member. A member that is not wanted drains.",
        examples=[True],
    )
    worker: str | None = Field(description="Id of the worker. `null`: no worker.", examples=["wk_5f3a9c"])
    since: Timestamp = Field(description="When this phase began.")
    sessions: int = Field(description="Number of sessions that hold a slot of this worker.", examples=[3])
    suspended: int = Field(
        description="Number of sessions whose state is in this worker's host memory.", examples=[1]
    )
    failures: int = Field(description="Number of failures in a row.", examples=[0])
    retry_in_s: float | None = Field(
        description="Seconds until the next attempt. `null` except in `backing_off`.", examples=[None]
    )
    reason: Note | None = Field(
        description="Why the member is in this phase. `null` for a tenant that is not an operator.",
        examples=["ready 3.2 s after its launch"],
    )
    playout: MemberPlayout | None = Field(
        description="How urgent the worker's sessions are. `null`: the worker has not reported, or no pool "
        "started it.",
        examples=[
            {
                "slack_s": 1.9,
                "credit_s": 1.5,
                "urgent": 0,
                "normal": 1,
                "relaxed": 2,
                "lowered": 0,
                "quality": 0.99,
                "loan": {"role": "donor", "peer": "wk_81c40b"},
            }
        ],
    )
    models: list[str] = Field(
        description="Models that a worker of the member serves. Empty: not known.", examples=[["toyworld"]]
    )


class PoolEvent(PublicOutput):
    """An action of the autoscaler."""

    at: Timestamp = Field(description="When the action happened.")
    member: str | None = Field(
        description="The pool member concerned. `null`: the whole pool.", examples=["local-0"]
    )
    worker: str | None = Field(description="The worker concerned, if any.", examples=["wk_5f3a9c"])
    action: str = Field(
        description="One of `target` (the size changed), `launch`, `adopt`, `ready`, `drain`, "
        "`extend` (a drain takes longer than its deadline), `release`, `gone` (the worker ended by itself), "
        "`fail`.",
        examples=["launch"],
    )
    reason: Note | None = Field(
        description="Why. `null` for a tenant that is not an operator.", examples=["attempt 1"]
    )


class Pool(PublicOutput):
    """One pool, as its autoscaler last reported it."""

    id: str = Field(validation_alias="pool", description="Id of the pool.", examples=["local"])
    provider: str = Field(
        description="What runs the workers: `local`, `ray`, `kubernetes` or `external`.", examples=["local"]
    )
    target: int | None = Field(
        description="Number of workers wanted. `null`: another system starts the workers.", examples=[3]
    )
    ready: int = Field(description="Number of ready workers.", examples=[2])
    starting: int = Field(
        description="Number of members in `reserving`, `launching`, `loading` or `backing_off`.", examples=[1]
    )
    draining: int = Field(description="Number of draining workers.", examples=[0])
    members: list[PoolMember] = Field(
        description="The pool members. Workers that no pool started follow after them."
    )
    actions: list[PoolEvent] = Field(description="The newest actions of the autoscaler, newest last.")
    reason: Note | None = Field(
        description="Why the pool is not as wanted. `null`: it is as wanted, or the tenant is not an "
        "operator.",
        examples=[None],
    )
    scaling: PoolScaling | None = Field(
        description="The controller. `null`: another system starts the workers."
    )
    orders_version: int | None = Field(
        validation_alias="orders",
        description="Version of the orders in force. `null`: no answer of the state store yet, and hence no "
        "decisions.",
        examples=[4],
    )
    provider_error: Note | None = Field(
        description="Error of the provider. `null`: no error, or the tenant is not an operator.",
        examples=[None],
    )
    start_up_s: float | None = Field(
        description="Time from launch to ready of the newest ready worker, seconds. `null`: no worker has "
        "become ready yet.",
        examples=[3.2],
    )
    reported_at: Timestamp = Field(validation_alias="at", description="When the autoscaler reported this.")
    age_s: float = Field(
        description="Age of the report, seconds. An autoscaler reports every second.",
        examples=[0.3],
    )
    summary: str = Field(
        description="Why the pool has its size, in a sentence or two.",
        examples=["3 workers. No reason to change the size."],
    )

    @classmethod
    def of(cls, snapshot: PoolSnapshot, operator: bool) -> Self:
        """Return what an operator sees, or another tenant: reasons name processes, files and addresses."""
        values = snapshot.status.model_dump()
        if not operator:
            values |= {"reason": None, "provider_error": None}
            for item in (*values["members"], *values["actions"]):
                item["reason"] = None
        age_s = round(snapshot.age_s, 3)
        return cls.model_validate({**values, "age_s": age_s, "summary": summary(snapshot, operator)})


class PoolList(PublicOutput):
    """All pools."""

    pools: list[Pool] = Field(description="The pools that have reported in the last ten minutes, by id.")


class PoolOverride(PublicInput):
    """Fixes the number of workers, independent of the load."""

    workers: int = Field(
        ge=0,
        le=WORKERS_LIMIT,
        description="Number of workers, within the pool's limits `least` and `most`.",
        examples=[3],
    )


class PoolDryRun(PublicInput):
    """Sets whether the controller only reports what it would do."""

    dry_run: bool = Field(
        description="`true`: the controller changes nothing.",
        examples=[True],
    )


class PoolOrderSet(PublicOutput):
    """All orders for a pool. They survive restarts, and the autoscaler receives them within a second."""

    pool: str = Field(description="Id of the pool.", examples=["local"])
    version: int = Field(description="Raised by every change. 0: no order yet.", examples=[4])
    override: int | None = Field(
        description="Fixed number of workers. `null`: the controller decides.", examples=[3]
    )
    dry_run: bool | None = Field(
        description="Whether the controller only reports. `null`: as in the autoscaler's settings.",
        examples=[None],
    )
    profile: Profile | None = Field(
        validation_alias="table", description="Profiled parameters. `null`: the autoscaler's default."
    )

    @classmethod
    def of(cls, orders: PoolOrders) -> Self:
        return cls.model_validate(orders.model_dump())
