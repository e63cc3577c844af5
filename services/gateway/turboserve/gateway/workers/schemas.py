"""Schemas of models and workers in REST answers."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.gateway.prompt_guides import PromptGuide
from turboserve.gateway.public import PublicOutput, Timestamp
from turboserve.gateway.sessions.control_schemas import ModelControl


class Model(PublicOutput):
    """A model that at least one ready worker serves."""

    id: str = Field(description="Id of the model.", examples=["toyworld"])
    default: bool = Field(description="Whether sessions that name no model use this one.", examples=[True])
    workers: int = Field(description="Number of ready workers that serve it.", examples=[2])
    capacity: int = Field(description="Number of sessions that these workers hold at once.", examples=[10])
    sessions: int = Field(description="Number of sessions that hold a slot now.", examples=[3])
    prompt_limit: int = Field(description="Maximum number of characters of a prompt.", examples=[2000])
    prompt_guide: PromptGuide | None = Field(
        description="What the model understands of a prompt. `null`: it reads any text."
    )
    controls: list[ModelControl] = Field(
        description="What the model takes beside a prompt, as its newest worker declares it."
    )


class ModelList(PublicOutput):
    """All models that ready workers serve."""

    models: list[Model] = Field(description="The models, by id.")


class Worker(PublicOutput):
    """One worker."""

    id: str = Field(description="Id of the worker.", examples=["wk_5f3a9c"])
    model: str = Field(description="Model that the worker serves.", examples=["toyworld"])
    phase: WorkerPhase = Field(description="Phase of the worker.", examples=["ready"])
    capacity: int = Field(description="Number of sessions that the worker holds at once.", examples=[5])
    floor_capacity: int = Field(
        description="Number of sessions that the worker holds at most, while it absorbs a burst at lower "
        "quality. At least `capacity`.",
        examples=[10],
    )
    sessions: int = Field(description="Number of sessions that hold a slot.", examples=[3])
    incoming: int = Field(
        description="Number of sessions that migrate to this worker. Each has a slot reserved if it runs.",
        examples=[0],
    )
    suspended: int = Field(
        description="Number of sessions whose state is in the worker's host memory.", examples=[1]
    )
    device: str = Field(description="Device of the worker.", examples=["cuda"])
    host: str = Field(description="Name of the worker's machine. Empty: not known.", examples=["gpu-07"])
    chunk_latency_s: dict[int, float] = Field(
        description="Measured latency of a chunk by batch size, seconds.", examples=[{"1": 0.13, "2": 0.21}]
    )
    started_at: Timestamp = Field(description="When the worker started.")
    renewed_at: Timestamp = Field(description="When the worker last renewed its registration.")
    reason: str | None = Field(description="Why the worker is in this phase, if known.", examples=[None])

    @classmethod
    def of(cls, record: WorkerRecord) -> Self:
        return cls.model_validate({**record.model_dump(), "floor_capacity": record.most_sessions})


class WorkerList(PublicOutput):
    """Workers of all pools, and workers that no pool started."""

    workers: list[Worker] = Field(description="The workers.")
