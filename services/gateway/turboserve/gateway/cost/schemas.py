"""Schemas of the cost in REST requests and answers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from turboserve.contracts.base import Id, Text
from turboserve.contracts.cost import LARGEST
from turboserve.contracts.cost import CostReport as CostReportContract
from turboserve.gateway.public import ModelName, PublicInput, PublicOutput, Timestamp


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


_Reason = Annotated[Text, Field(min_length=1, max_length=500), AfterValidator(_not_blank)]
_GPU_SECONDS = "GPU-seconds: seconds of workers, times the GPUs of each."
_MONEY = "Amount in the report's currency."


class NewCorrection(PublicInput):
    """A correction of the cost. Negative values reduce the cost."""

    gpu_seconds: float = Field(
        default=0.0,
        ge=-LARGEST,
        le=LARGEST,
        description="GPU-seconds to add. One of `gpu_seconds` and `money` is not 0.",
        examples=[-7200.0],
    )
    money: float = Field(default=0.0, ge=-LARGEST, le=LARGEST, description="Money to add.", examples=[-5.0])
    session: Id | None = Field(
        default=None,
        description="Session whose share is corrected. `null`: no particular session.",
        examples=["ses_5f3a9c"],
    )
    reason: _Reason = Field(
        description="Why. Kept and shown in the report.",
        examples=["the clock of pool h100 was an hour ahead"],
    )
    id: Id | None = Field(
        default=None,
        description="Chosen by the client, so that a repeat of the request makes no second correction.",
        examples=["cor_march_1"],
    )

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.gpu_seconds and not self.money:
            raise ValueError("gpu_seconds and money: one of them must not be 0")
        return self


class Correction(PublicOutput):
    """An amount that an operator added to the cost. Only another correction undoes it."""

    id: str = Field(description="Id of the correction.", examples=["cor_march_1"])
    session: str | None = Field(
        description="Session whose share was corrected, if any.", examples=["ses_5f3a9c"]
    )
    gpu_seconds: float = Field(description="GPU-seconds added.", examples=[-7200.0])
    money: float = Field(description="Money added.", examples=[-5.0])
    reason: str = Field(description="Why.", examples=["the clock of pool h100 was an hour ahead"])
    by: str = Field(description="Tenant that made the correction.", examples=["operations"])
    at: Timestamp = Field(description="When it was made.")


class Cost(PublicOutput):
    """An amount."""

    gpu_seconds: float = Field(description=_GPU_SECONDS, examples=[7200.0])
    money: float = Field(description=_MONEY, examples=[5.0])


class KindCost(Cost):
    """The cost of all workers of one kind."""

    kind: str = Field(description="Kind of hardware, as in the price list.", examples=["h100"])
    price_per_gpu_hour: float = Field(
        description="The current price. `money` is counted at the price at the time of use.", examples=[2.5]
    )
    workers: int = Field(description="Number of workers since the beginning.", examples=[12])
    running: int = Field(description="Number of workers that run now.", examples=[3])
    starting_gpu_seconds: float = Field(
        description="The part from a launch until the worker was ready or had ended.", examples=[120.0]
    )
    estimated_gpu_seconds: float = Field(
        description="The part measured by wall clocks, because no monotonic clock measured it.",
        examples=[0.0],
    )


class PoolCost(Cost):
    """The cost of all workers of one pool."""

    pool: str | None = Field(
        description="Id of the pool. `null`: workers that no pool started.", examples=["local"]
    )


class SessionCost(Cost):
    """A session's share of its workers' time.

    Each second of a worker is split evenly among the sessions that hold a slot on it. A second in which no
    session holds a slot counts as idle.
    """

    session: str = Field(description="Id of the session.", examples=["ses_5f3a9c"])
    model: ModelName = Field(description="Model of the session.", examples=["toyworld"])
    phase: str = Field(description="Phase of the session.", examples=["active"])
    corrected_gpu_seconds: float = Field(
        description="GPU-seconds that corrections add to the share.", examples=[0.0]
    )
    corrected_money: float = Field(description="Money that corrections add to the share.", examples=[0.0])


class CostReport(PublicOutput):
    """The whole cost since the first worker. `total` = `used` + `idle` + `corrected`."""

    currency: str = Field(description="Currency of all amounts (ISO 4217).", examples=["USD"])
    since: Timestamp | None = Field(description="When the first worker was launched. `null`: no worker yet.")
    total: Cost = Field(description="The whole cost.")
    used: Cost = Field(description="The sum of the shares of all sessions, of all tenants.")
    idle: Cost = Field(
        description="The cost of starting workers, and of workers on which no session held a slot."
    )
    corrected: Cost = Field(
        description="The sum of all corrections. `kinds`, `pools` and shares do not include corrections."
    )
    estimated_gpu_seconds: float = Field(
        description="The part of the total that no monotonic clock has measured.", examples=[0.0]
    )
    corrections: list[Correction] = Field(
        description="The newest corrections: of the tenant's sessions, or all for an operator."
    )
    kinds: list[KindCost] = Field(description="The cost by kind of worker.")
    pools: list[PoolCost] = Field(description="The cost by pool.")
    sessions: list[SessionCost] = Field(description="Shares of the tenant's own sessions, newest first.")
    at: Timestamp = Field(description="When this was counted.")

    @classmethod
    def of(cls, report: CostReportContract) -> Self:
        return cls.model_validate(report.model_dump())
