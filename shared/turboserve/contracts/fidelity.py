"""Playout slack and fidelity of sessions, as services exchange them (SlackServe, 3.1 and 4.2)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from turboserve.contracts.base import Contract

LARGEST_STEPS = 1_000
LARGEST_WINDOW = 10_000
LARGEST_SLACK_S = 1e9
"""Limit of slacks and credits, seconds: as of media time."""

Quality = Annotated[float, Field(ge=0, le=1)]
"""Quality of a chunk, relative to the best configuration's: 1 is the best."""
LARGEST_LEAD_S = 60.0
LeadSeconds = Annotated[float, Field(gt=0, le=LARGEST_LEAD_S)]
"""Limit of a session's lead, seconds. A worker raises a smaller lead to one chunk."""
TIER_ALPHA = 2.0
TierAlpha = Annotated[float, Field(gt=0, le=100)]
"""α: width of a tier, as a multiple of a chunk's time T (SlackServe, 3.1)."""
SlackSeconds = Annotated[float, Field(ge=-LARGEST_SLACK_S, le=LARGEST_SLACK_S)]


class Tier(StrEnum):
    """Urgency of a session by its credit C, where T is the time of its next chunk and α a setting."""

    URGENT = "urgent"
    """C < α T."""
    NORMAL = "normal"
    """α T ≤ C ≤ 2 α T."""
    RELAXED = "relaxed"
    """C > 2 α T."""


class ChunkFidelity(Contract):
    """The configuration of one chunk, and its measured quality."""

    steps: int = Field(ge=1, le=LARGEST_STEPS)
    """Number of denoising forwards."""
    window_chunks: int = Field(ge=1, le=LARGEST_WINDOW)
    """Number of newest chunks that attention reads beside the sink, the chunk itself included."""
    sparsity: float = Field(default=0.0, ge=0, lt=1)
    """Share of the key blocks that attention skips."""
    fast_decoder: bool = False
    """Whether the model's second, faster decoder has decoded it."""
    quality: Quality | None = None
    """None: not measured."""


class QualityLimits(Contract):
    """What the owner of a session allows its worker to do to the quality of chunks."""

    floor: Quality | None = None
    """Least quality of a chunk. None: the floor of the worker's profile."""
    pin: bool = False
    """Whether every chunk is generated at the best configuration."""


class SessionSlack(Contract):
    """Playout slack of one session, by the engine that runs it, at the time of the report."""

    slack_s: SlackSeconds
    """P: seconds of generated video that the viewer has left to see. Before the first chunk: seconds until
    the first chunk's deadline."""
    credit_s: SlackSeconds
    """C = P − (R + T): slack less the rest of the chunk in work and the time of the next chunk."""
    tier: Tier
    lateness_s: float = Field(default=0.0, ge=0, le=LARGEST_SLACK_S)
    """How late the session's next chunk is expected to be, with the queue of the worker counted. 0: in
    time."""
    playing: bool = True
    """Whether the slack shrinks with time: a viewer plays the video, or waits for the first chunk."""
