"""The forecast of a worker's next chunks, chunk by chunk. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turboserve.worker.engine.fidelity_forecast import HORIZON, EngineLoad, StreamLoad


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
        begins_at_s = max(begins_s, stream.returns_s)
        ready_s = begins_at_s + stream.context_s
        if stream.context_s and pace_s > 0:
            work, place = stream.context_s / pace_s, stream.place
            chunks.append(PlannedChunk(stream, due_s, begins_at_s, place, work, place, place, context=True))
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
