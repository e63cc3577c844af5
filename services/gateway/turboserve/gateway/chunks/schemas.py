"""Schemas of a chunk's history in REST answers."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from turboserve.gateway.public import PublicOutput, Timestamp
from turboserve.gateway.sessions.migration_schemas import SessionDecision


class HopName(StrEnum):
    """The steps of a chunk from the request to the screen, in their order."""

    CREATED = "created"
    PROMPTED = "prompted"
    DECIDED = "decided"
    PLACED = "placed"
    FENCED = "fenced"
    DUE = "due"
    STARTED = "started"
    DENOISED = "denoised"
    DECODED = "decoded"
    PACKAGED = "packaged"
    PUBLISHED = "published"
    APPENDED = "appended"
    DELIVERED = "delivered"
    SHOWN = "shown"


class Hop(PublicOutput):
    """One step of a chunk."""

    name: HopName = Field(
        description="`created`: the session's row is committed. `prompted`: the row of the prompt or "
        "control that the chunk is the first to show. `decided`: the scheduler chose the worker. `placed`: "
        "the owner is committed. `fenced`: the owner is in the log. `due`: the session may generate the "
        "chunk. `started`: its first forward is gathered. `denoised`, `decoded`, `packaged`: its latents, "
        "its frames and its video are there. `published`: the worker appends it. `appended`: the log has it. "
        "`delivered`: this gateway has sent it to a first viewer. `shown`: a viewer reported its first "
        "frame.",
        examples=["appended"],
    )
    at: Timestamp = Field(description="When the step was done, by the wall clock of `by`.")
    by: str = Field(description="Whose clock it is.", examples=["broker"])
    since_s: float | None = Field(
        description="Seconds since the hop before. Between two clocks it may be below 0. `null`: the first.",
        examples=[0.004],
    )


class ChunkHistory(PublicOutput):
    """How one chunk came about, step by step. A step that is not known, or not done yet, is left out."""

    session: str = Field(description="Id of the session.", examples=["ses_5f3a9c"])
    index: int = Field(description="Index of the chunk.", examples=[0])
    epoch: int = Field(description="Number of the ownership that it was generated under.", examples=[1])
    worker: str = Field(description="The worker that generated it.", examples=["wk_5f3a9c"])
    control_seq: int = Field(description="Number of the newest prompt or control in it.", examples=[0])
    bytes: int = Field(description="Size of its video.", examples=[48213])
    compute_s: float = Field(description="From its first forward to its packaging, seconds.", examples=[0.31])
    slack_s: float | None = Field(
        description="Video that the viewer had left when it was published, seconds. `null`: not known.",
        examples=[1.9],
    )
    decision: SessionDecision | None = Field(
        description="Why this worker. `null`: not the first chunk of its ownership, or no longer known."
    )
    total_s: float = Field(description="From the first hop to the last, seconds.", examples=[1.2])
    hops: list[Hop] = Field(description="The steps, in their order.")
