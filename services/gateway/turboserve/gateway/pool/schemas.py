"""Schemas of models and workers in REST answers."""

from __future__ import annotations

from pydantic import BaseModel, Field

from turboserve.contracts.base import UnixSeconds
from turboserve.contracts.workers import WorkerPhase, WorkerRecord


class Model(BaseModel):
    """A model that at least one live worker serves."""

    id: str
    default: bool = Field(description="Used by sessions that name none.")
    workers: int
    capacity: int = Field(description="Sessions that fit at once.")
    sessions: int = Field(description="Sessions that hold a slot now.")


class ModelList(BaseModel):
    models: list[Model]


class Worker(BaseModel):
    """One worker."""

    id: str
    model: str
    phase: WorkerPhase
    capacity: int
    sessions: int = Field(description="Sessions that hold a slot.")
    incoming: int = Field(
        description="Sessions that are migrating here; each has a slot reserved if it runs."
    )
    suspended: int = Field(description="Sessions whose state it holds in host memory.")
    device: str
    host: str = Field(description="The machine it runs on; empty: it does not say.")
    chunk_latency_s: dict[int, float] = Field(description="Measured latency of a chunk, seconds, by batch.")
    started_at: UnixSeconds
    renewed_at: UnixSeconds
    reason: str | None

    @classmethod
    def of(cls, record: WorkerRecord) -> Worker:
        return cls(**record.model_dump(include=set(cls.model_fields)))


class WorkerList(BaseModel):
    workers: list[Worker]
