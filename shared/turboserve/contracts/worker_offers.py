"""What a worker offers: its classes, the size of its frames, and its price."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from turboserve.allocation.classes import CLASSES_LIMIT
from turboserve.contracts.base import Contract, Count, Id, Text
from turboserve.contracts.controls import ControlDeclarations
from turboserve.contracts.sessions import WeightsDigest

FRAME_LIMIT = 16_384
"""Maximum width and height of a frame, pixels."""
PRICE_LIMIT = 1e12
"""Maximum price of a worker per hour: far above any."""
SLOTS_LIMIT = 10_000
"""Maximum number of sessions on one worker."""

Slots = Annotated[int, Field(ge=0, le=SLOTS_LIMIT)]
LatencyProfile = Annotated[
    dict[Annotated[int, Field(ge=1, le=SLOTS_LIMIT)], Annotated[float, Field(ge=0, le=86_400)]],
    Field(max_length=256),
]
"""Latency of a chunk, seconds, by the number of sessions in the batch: L(b)."""

Side = Annotated[int, Field(ge=1, le=FRAME_LIMIT)]


class FrameSize(Contract):
    """Size of a frame, pixels."""

    width: Side
    height: Side


class ServedClass(Contract):
    """One class of a worker that serves several: a model at one frame size."""

    model: Id
    """Name of the class, as sessions' rows have it."""
    capacity: Slots
    """n_j, the number of sessions of this class that the worker carries alone. A session is 1 / n_j of it."""
    weights_digest: WeightsDigest | None = None
    """See `LoadReport.weights_digest`."""
    controls: ControlDeclarations = ()
    """See `LoadReport.controls`."""
    frame: FrameSize | None = None
    """See `LoadReport.frame`."""
    chunk_latency_s: LatencyProfile = {}
    """See `LoadReport.chunk_latency_s`."""
    sessions: Count = 0
    """Sessions of this class that hold a slot. Only in a listing of workers."""


def _or_none(classes: tuple[ServedClass, ...] | None) -> tuple[ServedClass, ...] | None:
    return classes or None


ServedClasses = Annotated[
    Annotated[tuple[ServedClass, ...], Field(max_length=CLASSES_LIMIT)] | None, AfterValidator(_or_none)
]
"""Classes of a worker that serves several. None, or none of them: it serves one."""


class WorkerPrice(Contract):
    """What a worker costs."""

    kind: Text = Field(max_length=64)
    """Its hardware, by its name in the state store's prices."""
    per_hour: Annotated[float, Field(ge=0, le=PRICE_LIMIT)]
    """Money per hour, of all its GPUs."""
    currency: Text
