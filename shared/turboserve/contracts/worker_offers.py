"""What a worker offers: the size of its frames, and its price."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from turboserve.contracts.base import Contract, Text

FRAME_LIMIT = 16_384
"""Maximum width and height of a frame, pixels."""
PRICE_LIMIT = 1e12
"""Maximum price of a worker per hour: far above any."""


Side = Annotated[int, Field(ge=1, le=FRAME_LIMIT)]


class FrameSize(Contract):
    """Size of a frame, pixels."""

    width: Side
    height: Side


class WorkerPrice(Contract):
    """What a worker costs."""

    kind: Text = Field(max_length=64)
    """Its hardware, by its name in the state store's prices."""
    per_hour: Annotated[float, Field(ge=0, le=PRICE_LIMIT)]
    """Money per hour, of all its GPUs."""
    currency: Text
