"""Schemas of pools, orders and cost in REST requests and answers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.base import Id
from turboserve.contracts.cost import LARGEST
from turboserve.contracts.pool import PoolMemberPhase, PoolOrders, PoolStatus
from turboserve.gateway.scaling.pool_snapshots import SILENT_S, PoolSnapshot


class Pool(PoolStatus):
    """One pool, as its autoscaler last reported."""

    age_s: float = Field(description="How old this is, seconds; an autoscaler speaks every second.")
    summary: str = Field(description="Why the pool is as it is, in one sentence.")

    @classmethod
    def of(cls, snapshot: PoolSnapshot) -> Self:
        return cls(**dict(snapshot.status), age_s=round(snapshot.age_s, 3), summary=summary(snapshot))


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Override(_Order):
    """Fixes the number of workers, whatever the load."""

    workers: int | None = Field(ge=0, description="null: the controller decides again.")


class DryRun(_Order):
    """Whether the controller only reports what it would do."""

    dry_run: bool | None = Field(description="null: as the autoscaler's settings say.")


def _said(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("must not be blank, nor contain the character NUL")
    return text


Reason = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_said)]


class CostCorrection(_Order):
    """An operator's correction of the cost. Negative values reduce the cost."""

    gpu_seconds: float = Field(default=0.0, ge=-LARGEST, le=LARGEST, allow_inf_nan=False)
    money: float = Field(default=0.0, ge=-LARGEST, le=LARGEST, allow_inf_nan=False)
    session: Id | None = Field(default=None, description="Whose share is corrected; null: nobody's.")
    reason: Reason
    id: Id | None = Field(default=None, description="Chosen by the client, so that it may send again.")

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.gpu_seconds and not self.money:
            raise ValueError("gpu_seconds and money: one of them must not be 0")
        return self


class Orders(BaseModel):
    """All orders for a pool. They survive restarts, and the autoscaler receives them within a second."""

    pool: str
    version: int = Field(description="Raised by every change; 0: nothing was ever ordered.")
    override: int | None
    dry_run: bool | None
    table: ProfileTable | None = Field(description="null: the table that the autoscaler ships with.")

    @classmethod
    def of(cls, orders: PoolOrders) -> Self:
        return cls(**dict(orders))


def summary(snapshot: PoolSnapshot) -> str:
    """Return the most serious reason for the pool's state, in one sentence."""
    status = snapshot.status
    if snapshot.age_s > SILENT_S:
        return f"No report from the autoscaler for {snapshot.age_s:.0f} s; workers go on without it."
    if status.provider_error is not None:
        return f"The provider complains: {status.provider_error}."
    if status.reason is not None:
        return f"{status.reason[:1].upper()}{status.reason[1:]}."
    scaling = status.scaling
    if scaling is None:
        return f"{_count(status.ready, 'worker')}, started by someone else."
    workers = _count(scaling.target, "worker")
    if status.orders is None:
        return "The state store has not said yet what is ordered: the size stays."
    if status.draining:
        held = sum(s.sessions + s.suspended for s in status.members if s.phase is PoolMemberPhase.DRAINING)
        drain = "worker drains" if status.draining == 1 else "workers drain"
        return f"{status.draining} {drain}, and {_count(held, 'session')} have to go elsewhere first."
    if scaling.mode == "override":
        return f"An order holds {workers}; the controller would have {scaling.advice}."
    if scaling.mode == "dry_run":
        return f"A dry run: {workers}; the controller would have {scaling.advice}."
    if scaling.least == scaling.most:
        return f"{workers}: the pool's size is fixed."
    if scaling.stale:
        return "No recent load report: not scaling in."
    changes = [d for d in scaling.decisions if d.target != d.previous]
    if changes:
        return f"{workers} since the last change: {changes[-1].reason}."
    return f"{workers}, and no reason yet for another number."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
