"""Schemas of models and workers in REST answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field

from turboserve.allocation.classes import SessionClass
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.gateway.model_offers import by_class, size_of
from turboserve.gateway.prompt_guides import PromptGuide
from turboserve.gateway.public import ModelName, PublicOutput, Timestamp
from turboserve.gateway.sessions.control_schemas import ModelControl


class ServingKind(PublicOutput):
    """Ready workers of one kind that serve a model at one size."""

    kind: str = Field(
        description="Hardware of the workers, by its name in the prices. Without prices: their device.",
        examples=["h100"],
    )
    workers: int = Field(description="Number of the workers.", examples=[2])
    sessions_per_worker: float = Field(
        description="Number of sessions that one of them holds at once, on average.", examples=[5.0]
    )
    price_per_worker_hour: float | None = Field(
        description="Money that one of them costs per hour, on average. `null`: no price is set.",
        examples=[3.99],
    )
    price_per_session_hour: float | None = Field(
        description="Money that a session costs per hour on a full worker: `price_per_worker_hour` by "
        "`sessions_per_worker`. `null`: no price is set, or the workers hold no session.",
        examples=[0.798],
    )
    currency: str | None = Field(
        description="Currency of the prices (ISO 4217). `null`: no price is set.", examples=["USD"]
    )

    @classmethod
    def of(cls, kind: str, workers: Sequence[WorkerRecord]) -> Self:
        """Describe the workers of a kind. A price counts only if all of them have one."""
        capacity = sum(one.capacity for one in workers)
        prices = [one.price for one in workers if one.price is not None]
        priced = len(prices) == len(workers)
        hour = sum(price.per_hour for price in prices)
        return cls(
            kind=kind,
            workers=len(workers),
            sessions_per_worker=capacity / len(workers),
            price_per_worker_hour=hour / len(workers) if priced else None,
            price_per_session_hour=hour / capacity if priced and capacity else None,
            currency=prices[0].currency if priced else None,
        )


class ModelSize(PublicOutput):
    """A frame size at which ready workers serve a model."""

    width: int | None = Field(
        description="Width of a frame, pixels. `null`: workers of an earlier release do not say it.",
        examples=[128],
    )
    height: int | None = Field(description="Height of a frame, pixels: see `width`.", examples=[128])
    default: bool = Field(
        description="Whether sessions of the model that name no size have this one.", examples=[True]
    )
    workers: int = Field(description="Number of ready workers that serve it.", examples=[2])
    capacity: int = Field(description="Number of sessions that these workers hold at once.", examples=[10])
    sessions: int = Field(description="Number of sessions that hold a slot now.", examples=[3])
    kinds: list[ServingKind] = Field(description="The kinds of these workers, by name.")

    @classmethod
    def of(cls, name: str, workers: Sequence[WorkerRecord], *, default: bool) -> Self:
        """Describe the workers of a class, which `name` is the name of."""
        sizes = [size for one in workers if (size := size_of(one)) is not None]
        width, height = sizes[-1] if sizes else (None, None)
        kinds: dict[str, list[WorkerRecord]] = {}
        for one in workers:
            kinds.setdefault(one.device_kind if one.price is None else one.price.kind, []).append(one)
        return cls(
            width=width,
            height=height,
            default=default,
            workers=len(workers),
            capacity=sum(one.capacity for one in workers),
            sessions=sum(one.sessions for one in workers),
            kinds=[ServingKind.of(kind, of_kind) for kind, of_kind in sorted(kinds.items())],
        )


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
    sizes: list[ModelSize] = Field(
        description="The frame sizes that a session may ask for, the default first, and what serves each now."
    )


class ModelList(PublicOutput):
    """All models that ready workers serve."""

    models: list[Model] = Field(description="The models, by id.")


class WorkerClass(PublicOutput):
    """What a worker serves of one model at one frame size."""

    model: ModelName = Field(description="The model.", examples=["toyworld"])
    width: int | None = Field(description="Width of a frame, pixels. `null`: not known.", examples=[128])
    height: int | None = Field(description="Height of a frame, pixels: see `width`.", examples=[128])
    capacity: int = Field(
        description="Number of these sessions that the worker holds at once without others.", examples=[5]
    )
    sessions: int = Field(description="Number of these sessions that hold a slot.", examples=[3])
    chunk_latency_s: dict[int, float] = Field(
        description="Measured latency of a chunk by batch size, seconds.", examples=[{"1": 0.13, "2": 0.21}]
    )

    @classmethod
    def of(cls, row: WorkerRecord) -> Self:
        """`row`: that of a worker which serves this class alone."""
        width, height = size_of(row) or (None, None)
        return cls(
            model=SessionClass.of_name(row.model).model,
            width=width,
            height=height,
            capacity=row.capacity,
            sessions=row.sessions,
            chunk_latency_s=row.chunk_latency_s,
        )


class Worker(PublicOutput):
    """One worker. `model`, size, `capacity` and `chunk_latency_s` are those of its first class."""

    id: str = Field(description="Id of the worker.", examples=["wk_5f3a9c"])
    model: ModelName = Field(description="Model that the worker serves.", examples=["toyworld"])
    width: int | None = Field(
        description="Width of the frames that it generates, pixels. `null`: not known.", examples=[128]
    )
    height: int | None = Field(description="Height of these frames, pixels: see `width`.", examples=[128])
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
    classes: list[WorkerClass] = Field(
        description="The models and frame sizes that the worker serves, the first one first. A session takes "
        "1 / `capacity` of the worker, by its class."
    )

    @classmethod
    def of(cls, record: WorkerRecord) -> Self:
        width, height = size_of(record) or (None, None)
        classes = [WorkerClass.of(row) for row in by_class([record])]
        more = {"floor_capacity": record.most_sessions, "width": width, "height": height, "classes": classes}
        return cls.model_validate(record.model_dump() | more)


class WorkerList(PublicOutput):
    """Workers of all pools, and workers that no pool started."""

    workers: list[Worker] = Field(description="The workers.")
