"""Schemas of a pool's cost and of waiting sessions in REST answers."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from turboserve.contracts.base import Note
from turboserve.contracts.cost import ModelCost
from turboserve.gateway.public import ModelName, PublicOutput, Timestamp, class_members

_GPU_SECONDS = "GPU-seconds: seconds of workers, times the GPUs of each."
_MONEY = "Amount in the answer's currency."


class PoolCostPoint(PublicOutput):
    """The cost of one step."""

    at: Timestamp = Field(description="When the step began.")
    gpu_seconds: float = Field(description=_GPU_SECONDS, examples=[180.0])
    money: float = Field(description=_MONEY, examples=[0.125])


class TenantShare(PublicOutput):
    """The shares of one tenant's sessions in the time of the pool's workers."""

    tenant: str | None = Field(
        description="Id of the tenant. `null`: time of workers on which no session held a slot.",
        examples=["acme"],
    )
    gpu_seconds: float = Field(description=_GPU_SECONDS, examples=[7200.0])
    money: float = Field(description=_MONEY, examples=[5.0])


class ModelShare(PublicOutput):
    """The shares of the sessions of one model in the time of the pool's workers."""

    model: str | None = Field(
        description="Model of the sessions. `null`: time of workers on which no session held a slot.",
        examples=["toyworld"],
    )
    width: int | None = Field(
        description="Width of their frames, pixels. `null`: the model's own.", examples=[None]
    )
    height: int | None = Field(description="Height of their frames, pixels: see `width`.", examples=[None])
    gpu_seconds: float = Field(description=_GPU_SECONDS, examples=[7200.0])
    money: float = Field(description=_MONEY, examples=[5.0])

    @classmethod
    def of(cls, cost: ModelCost) -> Self:
        return cls.model_validate(cost.model_dump() | class_members(cost.model))


class PoolCostHistory(PublicOutput):
    """The cost of a pool in a range. Corrections are not in it."""

    currency: str = Field(description="Currency of all amounts (ISO 4217).", examples=["USD"])
    step_s: int = Field(description="Length of a step, seconds.", examples=[60])
    points: list[PoolCostPoint] = Field(description="The cost over time, oldest step first.")
    tenants: list[TenantShare] = Field(description="The 500 largest shares, largest first.")
    models: list[ModelShare] = Field(description="The same by model and frame size.")


class WaitingSession(PublicOutput):
    """A session that wants a slot and has none."""

    session: str = Field(description="Id of the session.", examples=["ses_5f3a9c"])
    tenant: str = Field(description="Tenant of the session.", examples=["acme"])
    model: ModelName = Field(description="Model of the session.", examples=["toyworld"])
    since: Timestamp = Field(description="When it requested the slot.")
    weight: float = Field(description="Weight of its API key among those that wait.", examples=[1.0])
    reason: Note | None = Field(
        description="Why it waits, by the scheduler's newest decision. `null`: no decision yet.",
        examples=["no worker has a free slot"],
    )


class WaitingList(PublicOutput):
    """Sessions that wait, longest wait first."""

    at: Timestamp = Field(description="The time of this answer.")
    total: int = Field(description="Number of all waiting sessions.", examples=[3])
    sessions: list[WaitingSession] = Field(description="Those that have waited longest.")
