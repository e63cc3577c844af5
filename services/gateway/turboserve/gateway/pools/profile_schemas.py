"""Schemas of the table of profiled parameters in REST requests and answers.

`turboserve profile autoscaler` writes its file in this form.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, FiniteFloat

from turboserve.contracts.autoscale import MOST_LEVELS, ProfileTable
from turboserve.contracts.base import NUMBER_LIMIT, Text
from turboserve.gateway.public import InputTime, PublicInput, PublicOutput, Timestamp

_Whole = Annotated[int, Field(ge=0, le=NUMBER_LIMIT)]
_Name = Annotated[Text, Field(max_length=64)]


class _Level(BaseModel):
    level: int = Field(
        ge=1,
        le=MOST_LEVELS,
        description="Number of the level, one more than that of the row before.",
        examples=[1],
    )
    volatility_from: float = Field(
        ge=0, description="Lower end of the interval of volatility, inclusive.", examples=[0.0]
    )
    volatility_to: float | None = Field(
        default=None,
        gt=0,
        description="Upper end of the interval, exclusive. `null` in the last row only: no upper end.",
        examples=[1.5],
    )
    latency_weight: float = Field(
        ge=0,
        le=1_000,
        description="λ: number of workers that one multiple of a lone chunk's latency is worth.",
        examples=[0.2],
    )
    target_utilization: float = Field(
        ge=0.01,
        le=1,
        description="ρ̂: share of a worker's capacity for which the pool is sized.",
        examples=[0.8],
    )
    predictive: bool = Field(
        default=False,
        description="Whether the forecast is a lower bound of the target at this level.",
        examples=[False],
    )
    segments: _Whole = Field(
        default=0,
        description="Number of trace segments behind this row. 0: copied from the next higher row.",
        examples=[12],
    )
    pass_rate: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of the segments without a chunk above the latency target.",
        examples=[1.0],
    )
    cost_s: float | None = Field(
        default=None, ge=0, description="Mean cost of the segments, worker-seconds.", examples=[83.5]
    )


class _Provenance(BaseModel):
    source: Text = Field(
        description="Names and digests of the traces, or another origin.", examples=["trace.csv 5f2c9a"]
    )
    command: Text = Field(
        default="",
        description="Command that made the table.",
        examples=["turboserve profile autoscaler --capacity 5"],
    )
    capacity: _Whole = Field(default=0, description="K: sessions on one worker in the replay.", examples=[5])
    latency_target_s: float = Field(
        default=0.0, ge=0, description="Latency target of a chunk, seconds.", examples=[0.67]
    )
    start_up_s: float = Field(
        default=0.0, ge=0, description="Scale-out delay in the replay, seconds.", examples=[10.0]
    )
    epoch_s: float = Field(
        default=1.0,
        ge=0.01,
        le=3_600,
        description="Length of the epochs in which activations are counted, seconds.",
        examples=[1.0],
    )
    window: int = Field(
        default=30, ge=2, le=10_000, description="Number of epochs in the detector's window.", examples=[30]
    )
    controller: dict[_Name, FiniteFloat] = Field(
        default={},
        max_length=64,
        description="The controller's hysteresis, cool-downs, windows and horizon in the replay.",
        examples=[{"scale_hysteresis": 0.1}],
    )
    segments: _Whole = Field(
        default=0, description="Number of trace segments of all levels together.", examples=[96]
    )
    late: _Whole | None = Field(
        default=None,
        description="Number of late chunks in a replay with the whole table. `null`: no such replay.",
        examples=[0],
    )
    activations: _Whole | None = Field(
        default=None,
        description="Number of sessions that became active in that replay.",
        examples=[2_101],
    )


class NewProfileLevel(_Level, PublicInput):
    """One row of a new profile: the parameters for one interval of volatility."""


class NewProfileProvenance(_Provenance, PublicInput):
    """The origin of a new profile."""

    made_at: InputTime | None = Field(default=None, description="When the table was made.")


class NewProfile(PublicInput):
    """Profiled parameters by volatility, from 0 up, without gaps or overlaps. The last level is open."""

    levels: list[NewProfileLevel] = Field(
        max_length=MOST_LEVELS, description="The rows, in ascending order of volatility."
    )
    provenance: NewProfileProvenance = Field(description="Where the table comes from.")

    def table(self) -> ProfileTable:
        """Return the bus contract. Raises InvalidInputError for gaps, overlaps and a closed last level."""
        return ProfileTable.model_validate(self.model_dump(exclude_none=True))


class ProfileLevel(_Level, PublicOutput):
    """One row of a profile: the parameters for one interval of volatility."""


class ProfileProvenance(_Provenance, PublicOutput):
    """The origin of a profile."""

    made_at: Timestamp = Field(description="When the table was made. 1970-01-01T00:00:00.000000Z: not known.")


class Profile(PublicOutput):
    """Profiled parameters by volatility, from 0 up, without gaps or overlaps. The last level is open."""

    levels: list[ProfileLevel] = Field(description="The rows, in ascending order of volatility.")
    provenance: ProfileProvenance = Field(description="Where the table comes from.")

    @classmethod
    def of(cls, table: ProfileTable) -> Self:
        return cls.model_validate(table.model_dump())
