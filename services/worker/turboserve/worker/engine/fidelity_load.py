"""What the choice of a configuration is made by: the sessions of one engine, and the cost of their chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.gather import LatencyProfile, gain_of


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """One session that generates, at the time of a decision. All times in seconds from now."""

    session: str
    slack_s: float
    """Playout slack P. Infinite: its viewer does not play."""
    undecoded: int = 0
    """Number of chunks whose latents are clean, and which are not delivered."""
    forwards_left: float = 0.0
    """Rest of the chunk in work, in forwards at the best configuration. 0: the session is at a boundary."""
    lead_s: float = math.inf
    """Largest lead: a chunk does not begin earlier than this before it is due."""
    chunks_left: int | None = None
    """Number of chunks that it has still to begin. None: its video has no end."""
    place: int = 0
    """Place of its newest chunk's configuration on the ladder."""
    lowest: int = 0
    """Lowest place on the ladder that the session may get."""
    raised_s: float = math.inf
    """Time since its configuration was last raised."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """All sessions of one engine that generate, and what their chunks cost."""

    ladder: FidelityLadder
    forward: LatencyProfile
    """L(b) of a forward at the best configuration."""
    after_s: float
    """Time from a chunk's clean latents to its delivery: decoding and packaging."""
    chunk_s: float
    """Playing time of one chunk."""
    streams: Sequence[StreamLoad]
    max_batch: int = 16

    @property
    def lanes(self) -> int:
        """Number of rows of a forward by which the gather policy serves so many sessions."""
        ready = max(1, len(self.streams))
        return self.forward.paying_batch(min(self.max_batch, ready), gain_of(ready))

    def chunk_time_s(self, place: int) -> float:
        """Time T of a chunk at this place of the ladder, made alone."""
        return self.ladder.rungs[place].forwards * self.forward(1) + self.after_s


def stream_of(session: str, load: EngineLoad) -> StreamLoad:
    """The load of this session."""
    return next(each for each in load.streams if each.session == session)
