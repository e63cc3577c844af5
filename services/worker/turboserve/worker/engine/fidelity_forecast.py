"""The load of one engine, and when its sessions' next chunks will be ready under it. Pure arithmetic.

A policy chooses configurations by the load. The forecast serves chunks in batches, earliest deadline first;
it is the feasibility test of the policy `in-time`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.gather import LatencyProfile, gain_of

HORIZON = 3
"""Number of next chunks of each session that a forecast covers."""
LATE_S = 1e-9
"""Lateness below which a chunk is in time: rounding."""


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
    context_s: float = 0.0
    """Time of the forwards between its chunk in work and its next chunk: a recache or a replay."""
    lead_s: float = math.inf
    """Largest lead: a chunk does not begin earlier than this before it is due."""
    chunks_left: int | None = None
    """Number of chunks that it has still to begin. None: its video has no end."""
    place: int = 0
    """Place of its newest chunk's configuration on the ladder."""
    lowest: int = 0
    """Lowest place on the ladder that the session may get."""
    held_place: int | None = None
    """Place that it may keep without a raise. None: `place`. It differs where its newest chunk was lowered
    only because its viewer had nothing to play."""
    raised_s: float = math.inf
    """Time since its configuration was last raised."""
    starts: bool = False
    """Whether its viewer has nothing to play until its next chunk: the session or its new scene begins."""

    @property
    def cap(self) -> int:
        """Highest place of its next chunk without a raise."""
        return min(self.place if self.held_place is None else self.held_place, self.lowest)


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
    encoding_s: float = 0.0
    """Time in which prompts are encoded before the next forward."""

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


@dataclass(slots=True)
class PlannedChunk:
    """One chunk that is to be generated, or the rest of one."""

    stream: StreamLoad
    due_s: float
    """When its latents must be clean."""
    release_s: float
    """When it may begin."""
    place: int
    """Place of its configuration on the ladder."""
    forwards: float
    """Work, in forwards at the best configuration."""
    lowest: int
    """Lowest place that the chunk may get."""
    highest: int = 0
    """Highest place that the chunk may get."""
    next: bool = False
    """Whether it is the next chunk that its session begins."""
    context: bool = False
    """Whether it is no chunk, but the forwards before the next one: see `StreamLoad.context_s`."""


def next_chunks(load: EngineLoad, horizon: int = HORIZON) -> list[PlannedChunk]:
    """The next chunks of all sessions at their best configurations, earliest deadline first.

    A session whose viewer does not play has no deadline, and only the rest of its chunk in work counts.
    """
    best, begins_s = load.ladder.rungs[0].forwards, load.encoding_s
    pace_s = load.forward(load.lanes) / load.lanes
    chunks: list[PlannedChunk] = []
    for stream in load.streams:
        # The first chunk that is not yet clean must be clean when the viewer has seen those before it.
        due_s = stream.slack_s + stream.undecoded * load.chunk_s - load.after_s
        if stream.forwards_left > 0:
            # Its configuration cannot change any more.
            rest, place = stream.forwards_left, stream.place
            chunks.append(PlannedChunk(stream, due_s, begins_s, place, rest, place, place))
            due_s += load.chunk_s
        if math.isinf(due_s):
            continue
        ready_s = begins_s + stream.context_s
        if stream.context_s and pace_s > 0:
            work, place = stream.context_s / pace_s, stream.place
            chunks.append(PlannedChunk(stream, due_s, begins_s, place, work, place, place, context=True))
        left = horizon if stream.chunks_left is None else min(horizon, stream.chunks_left)
        for ahead in range(left):
            release_s = max(ready_s, due_s + load.after_s - stream.lead_s)
            chunks.append(PlannedChunk(stream, due_s, release_s, 0, best, stream.lowest, next=ahead == 0))
            due_s += load.chunk_s
    chunks.sort(key=lambda chunk: chunk.due_s)
    return chunks


class Server:
    """The device as one server of the throughput that the gather policy's batches have.

    A chunk is ready when the work before it is done at the pace of full batches, and not before its own
    forwards are done at the speed of such a batch. The server never waits while any chunk may begin.
    """

    def __init__(self, load: EngineLoad, chunks: Sequence[PlannedChunk]) -> None:
        lanes = load.lanes
        self.row_s = load.forward(lanes)
        """Time of one forward of a full batch."""
        self.pace_s = self.row_s / lanes
        """Time of one row of it."""
        # Work with a later deadline fills the time until a chunk may begin.
        self.release_s = [chunk.release_s for chunk in chunks]
        for i in range(len(chunks) - 2, -1, -1):
            self.release_s[i] = min(self.release_s[i], self.release_s[i + 1])

    def done_s(self, chunks: Sequence[PlannedChunk]) -> list[float]:
        """When the work up to and with each chunk is done."""
        done, time = [], 0.0
        for chunk, release_s in zip(chunks, self.release_s, strict=True):
            time = max(time, release_s) + chunk.forwards * self.pace_s
            done.append(time)
        return done

    def ready_s(self, chunks: Sequence[PlannedChunk]) -> list[float]:
        """When each chunk's latents are clean."""
        done = self.done_s(chunks)
        return [
            max(time, self.soonest_s(chunk, chunk.forwards)) for chunk, time in zip(chunks, done, strict=True)
        ]

    def soonest_s(self, chunk: PlannedChunk, forwards: float) -> float:
        """When the chunk is ready if it never waits for others."""
        return chunk.release_s + forwards * (self.pace_s if chunk.context else self.row_s)


@dataclass(frozen=True)
class LatenessForecast:
    """What is expected of the sessions of a worker."""

    late: int
    """Number of chunks within the horizon that are expected to be late."""
    lateness_s: Mapping[str, float]
    """Expected lateness of each session's first chunk that is not yet clean, by session; 0: in time."""


def forecast(chunks: Sequence[PlannedChunk], ready_s: Sequence[float]) -> LatenessForecast:
    """The forecast of chunks, in the order of their deadlines, that are ready at these times."""
    lateness: dict[str, float] = {}
    late = 0
    for chunk, ready in zip(chunks, ready_s, strict=True):
        if chunk.context:
            continue
        over = ready - chunk.due_s
        lateness.setdefault(chunk.stream.session, max(0.0, over))
        late += over > LATE_S
    return LatenessForecast(late, lateness)
