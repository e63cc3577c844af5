"""Pools, orders and cost as clients see them."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.pool import PoolOrders, PoolStatus, SlotPhase
from turboserve.gateway.scaling.heard import SILENT_S, Word


class Pool(PoolStatus):
    """One pool, as its autoscaler last said."""

    age_s: float = Field(description="How old this is, seconds; an autoscaler speaks every second.")
    summary: str = Field(description="Why the pool is as it is, in one sentence.")

    @classmethod
    def of(cls, word: Word) -> Self:
        return cls(**dict(word.status), age_s=round(word.age_s, 3), summary=summary(word))


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Override(_Order):
    """Keep so many workers, whatever the load."""

    workers: int | None = Field(ge=0, description="null: the controller decides again.")


class DryRun(_Order):
    """Whether the controller only says what it would do."""

    dry_run: bool | None = Field(description="null: as the autoscaler's settings say.")


class Orders(BaseModel):
    """Everything that is ordered of a pool. It is kept over restarts; the autoscaler has it in a second."""

    pool: str
    version: int = Field(description="Raised by every change; 0: nothing was ever ordered.")
    override: int | None
    dry_run: bool | None
    table: ProfileTable | None = Field(description="null: the table that the autoscaler ships with.")

    @classmethod
    def of(cls, orders: PoolOrders) -> Self:
        return cls(**dict(orders))


def summary(word: Word) -> str:
    """Why the pool is as it is, worst first."""
    status = word.status
    if word.age_s > SILENT_S:
        return f"The autoscaler has said nothing for {word.age_s:.0f} s; workers go on without it."
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
        held = sum(s.sessions + s.suspended for s in status.slots if s.phase is SlotPhase.DRAINING)
        drain = "worker drains" if status.draining == 1 else "workers drain"
        return f"{status.draining} {drain}, and {_count(held, 'session')} have to go elsewhere first."
    if scaling.mode == "override":
        return f"An order holds {workers}; the controller would have {scaling.advice}."
    if scaling.mode == "dry_run":
        return f"A dry run: {workers}; the controller would have {scaling.advice}."
    if scaling.least == scaling.most:
        return f"{workers}: the pool's size is fixed."
    if scaling.stale:
        return "Nothing was heard of the load lately: the pool does not shrink."
    changes = [d for d in scaling.decisions if d.target != d.previous]
    if changes:
        return f"{workers} since the last change: {changes[-1].reason}."
    return f"{workers}, and no reason yet for another number."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
