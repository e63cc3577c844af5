"""Schemas of a pool's controller and its decisions in REST answers."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from turboserve.contracts.base import Note
from turboserve.gateway.pools.profile_schemas import ProfileProvenance
from turboserve.gateway.public import PublicOutput, Timestamp


class ScalingDecision(PublicOutput):
    """One decision of the controller, to act or not to act."""

    at: Timestamp = Field(description="When the decision was made.")
    action: str = Field(
        description="One of `out`, `in`, `hold`, `override`, `wake`, `limits`, `table`.", examples=["out"]
    )
    target: int = Field(description="Number of workers that the pool should have from now on.", examples=[3])
    previous: int = Field(description="The target before.", examples=[2])
    advice: int = Field(
        description="Number of workers that the controller wants. Differs from `target` in a dry run and "
        "under an override.",
        examples=[3],
    )
    reason: Note = Field(
        description="The reason, in words.",
        examples=["load 0.95 is above 0.75 + 0.1: ⌈9 / (5 × 0.75)⌉ = 3 workers at level 2"],
    )
    numbers: dict[str, float] = Field(
        description="The figures behind the decision.", examples=[{"rho_max": 0.95, "required": 9}]
    )


class PoolDecoding(PublicOutput):
    """The decode workers of a pool. Another system starts them."""

    workers: int = Field(description="Number of decode workers that the workers know.", examples=[1])
    sessions: int = Field(description="Sessions that they decode in real time.", examples=[12])
    needed: int | None = Field(
        description="Number of decode workers that the sessions need. `null`: not known, since none has said "
        "yet what it carries.",
        examples=[2],
    )
    limits: bool = Field(
        description="Whether the workers may have fewer sessions than they denoise. The controller adds no "
        "worker then, while more decode workers are needed than there are.",
        examples=[True],
    )


class PoolScaling(PublicOutput):
    """The controller of a pool: its parameters, its input and its decisions."""

    mode: str = Field(description="One of `auto`, `override`, `dry_run`.", examples=["auto"])
    target: int = Field(description="Number of workers that the pool should have.", examples=[3])
    advice: int = Field(description="Number of workers that the controller wants.", examples=[3])
    least: int = Field(description="Minimum number of workers.", examples=[1])
    most: int = Field(description="Maximum number of workers.", examples=[4])
    override: int | None = Field(
        description="The override in force, from an order or from the settings.", examples=[None]
    )
    volatility: float = Field(description="Measured volatility of the load.", examples=[0.8])
    basis: str = Field(
        description="What decides how much room the pool keeps: `learned` (from this pool's own demand) or "
        "`profile` (the profile's level at the measured volatility).",
        examples=["learned"],
    )
    level: int | None = Field(
        description="Level of this volatility in the profile. `null`: the learned headroom is in force.",
        examples=[None],
    )
    latency_weight: float = Field(description="λ in force.", examples=[0.2])
    target_utilization: float = Field(description="ρ̂ in force.", examples=[0.75])
    predictive: bool = Field(
        description="Whether the forecast is a lower bound of the size now.",
        examples=[False],
    )
    forecast_coverage: float | None = Field(
        description="Share of past forecasts whose errors the forecast's margin covers. `null`: no forecast "
        "is used.",
        examples=[0.98],
    )
    peak_window_s: float | None = Field(
        description="A scale-in keeps slots for the most sessions of this time, seconds.", examples=[300.0]
    )
    learned_from_s: float | None = Field(
        description="Time of demand behind the learned headroom, seconds. `null`: it is not in force.",
        examples=[5400.0],
    )
    forecast: float | None = Field(
        description="Number of sessions expected one scale-out delay ahead. `null`: no forecast.",
        examples=[9.4],
    )
    required: int | None = Field(
        description="Number of sessions that have a worker or wait for one. `null`: no load report yet.",
        examples=[9],
    )
    rho_max: float | None = Field(
        description="Load of the fullest worker: sessions by capacity. `null`: no load report yet.",
        examples=[0.95],
    )
    feedback_age_s: float | None = Field(
        description="Age of the newest load report, seconds. `null`: no load report yet.", examples=[0.4]
    )
    stale: bool = Field(
        description="Whether the load report is missing or too old. The pool does not shrink then.",
        examples=[False],
    )
    decoding: PoolDecoding | None = Field(
        description="The decode workers behind the pool's workers. `null`: its workers decode, or their "
        "decode workers are not known.",
        examples=[None],
    )
    refused: dict[str, int] = Field(
        description="Number of implausible, ignored load reports by reason.", examples=[{}]
    )
    activity: dict[str, int] = Field(
        description="Number of arrivals, departures, activations and idlings in the detector's window.",
        examples=[{"arrival": 3}],
    )
    profile: ProfileProvenance | None = Field(
        validation_alias="table",
        description="Origin of the profile in force. `null`: not known, or the learned headroom is in force.",
    )
    profile_differs: list[str] = Field(
        validation_alias="table_differs",
        description="Settings (or `capacity`) that differ from those of the profiling. If there are any, "
        "profile again.",
        examples=[[]],
    )
    decisions: list[ScalingDecision] = Field(description="The newest decisions, newest last.")

    @model_validator(mode="before")
    @classmethod
    def _without_a_profile(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Leave out what describes a profile while the learned headroom is in force."""
        return values | {"level": None, "table": None} if values["basis"] == "learned" else values
