"""What a worker's sessions need of its device, and when their chunks will be ready. Pure arithmetic.

A policy chooses configurations by the load. The forecast serves chunks in batches, earliest deadline first;
it is the feasibility test of the policy `in-time`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turboserve.static_frozen import statically_frozen
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.gather import LatencyProfile, gain_of

HORIZON = 3
"""Number of next chunks of each session that a forecast covers."""
LATE_S = 1e-9
"""Lateness below which a chunk is in time: rounding."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@statically_frozen()
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
    returns_s: float = 0.0
    """Time until its state is in a slab."""

    @property
    def cap(self) -> int:
        """Highest place of its next chunk without a raise."""
        return min(self.place if self.held_place is None else self.held_place, self.lowest)


@statically_frozen()
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


class ChunkQueue:
    """The next chunks of all sessions as arrays, earliest deadline first.

    A session whose viewer does not play has no deadline, and only the rest of its chunk in work counts.

    The device is one server of the throughput that the gather policy's batches have. A chunk is ready when
    the work before it is done at the pace of full batches, and not before its own forwards are done at the
    speed of such a batch. The server never waits while any chunk may begin.
    """

    def __init__(self, load: EngineLoad, horizon: int = HORIZON) -> None:
        """`horizon`: number of next chunks of each session."""
        self.load = load
        lanes = load.lanes
        self.row_s = load.forward(lanes)
        """Time of one forward of a full batch."""
        self.pace_s = self.row_s / lanes
        """Time of one row of it."""
        streams = load.streams
        slack = np.array([each.slack_s for each in streams], dtype=float)
        undecoded = np.array([each.undecoded for each in streams], dtype=float)
        rest = np.array([each.forwards_left for each in streams], dtype=float)
        context = np.array([each.context_s for each in streams], dtype=float)
        lead = np.array([each.lead_s for each in streams], dtype=float)
        returns = np.array([each.returns_s for each in streams], dtype=float)
        self.newest: Ints = np.array([each.place for each in streams], dtype=np.int64)
        """Place of each session's newest chunk, in the order of `load.streams`."""
        floors: Ints = np.array([each.lowest for each in streams], dtype=np.int64)
        held = [each.place if each.held_place is None else each.held_place for each in streams]
        self.caps: Ints = np.minimum(np.array(held, dtype=np.int64), floors)
        """Highest place of each session's next chunk without a raise."""
        left = np.array(
            [horizon if each.chunks_left is None else each.chunks_left for each in streams], dtype=np.int64
        )
        # Each session has a row. Its columns: rest of the chunk in work, context, next chunks.
        shape = len(streams), 2 + horizon
        exists, due, release = np.zeros(shape, bool), np.zeros(shape), np.full(shape, load.encoding_s, float)
        forwards, lowest = np.zeros(shape), np.repeat(self.newest[:, None], 2 + horizon, axis=1)
        # The first chunk that is not yet clean must be clean when the viewer has seen those before it.
        due[:, 0] = slack + undecoded * load.chunk_s - load.after_s
        exists[:, 0] = rest > 0
        forwards[:, 0] = rest
        due_s = np.where(exists[:, 0], due[:, 0] + load.chunk_s, due[:, 0])
        plays = np.isfinite(due_s)
        due_s = np.where(plays, due_s, 0.0)
        due[:, 1] = due_s
        may_begin = np.maximum(load.encoding_s, returns)
        release[:, 1] = may_begin
        if self.pace_s > 0:
            exists[:, 1] = plays & (context != 0)
            forwards[:, 1] = context / self.pace_s
        for ahead in range(horizon):
            at = 2 + ahead
            exists[:, at] = plays & (ahead < left)
            due[:, at] = due_s
            release[:, at] = np.maximum(may_begin + context, due_s + load.after_s - lead)
            forwards[:, at] = load.ladder.rungs[0].forwards
            lowest[:, at] = floors
            due_s = due_s + load.chunk_s
        cells = np.flatnonzero(exists)
        cells = cells[np.argsort(due.ravel()[cells], kind="stable")]
        self.stream, column = np.divmod(cells, 2 + horizon)
        """Index of each chunk's session in `load.streams`."""
        self.due_s: Floats = due.ravel()[cells]
        """When its latents must be clean."""
        self.release_s: Floats = release.ravel()[cells]
        """When it may begin."""
        self.forwards: Floats = forwards.ravel()[cells]
        """Work at the best configuration, in forwards."""
        self.lowest: Ints = lowest.ravel()[cells]
        """Lowest place on the ladder that it may get."""
        self.fixed: Bools = column < 2
        """Whether its configuration cannot change: it is in work, or it is a context."""
        self.context: Bools = column == 1
        """Whether it is no chunk, but the forwards before the next one: see `StreamLoad.context_s`."""
        self.next: Bools = column == 2
        """Whether it is the next chunk that its session begins."""
        self.lead_s: Floats = lead[self.stream]
        """Its session's largest lead."""
        self._each_s = np.where(self.context, self.pace_s, self.row_s)
        # Work with a later deadline fills the time until a chunk may begin.
        self.begins_s: Floats = np.minimum.accumulate(self.release_s[::-1])[::-1]
        """When the device may begin the chunk or a later one."""

    def __len__(self) -> int:
        return len(self.due_s)

    def done_s(self, work_s: Floats) -> Floats:
        """When the work up to and with each chunk is done.

        `work_s`: the device's time for each chunk, of one plan or of each of several.
        """
        total = np.cumsum(work_s, axis=-1)
        waited = np.maximum.accumulate(self.begins_s - (total - work_s), axis=-1)
        done: Floats = total + np.maximum(waited, 0.0)
        return done

    def soonest_s(self, forwards: Floats) -> Floats:
        """When each chunk is ready if it never waits for others."""
        soonest: Floats = self.release_s + forwards * self._each_s
        return soonest

    def ready_s(self, forwards: Floats) -> Floats:
        """When each chunk's latents are clean."""
        ready: Floats = np.maximum(self.done_s(forwards * self.pace_s), self.soonest_s(forwards))
        return ready

    def late(self) -> int:
        """Number of chunks that are late even if all chunks get their lowest configurations."""
        steps = self.load.ladder.steps
        forwards = np.where(self.fixed, self.forwards, steps.forwards[self.lowest])
        over_s = self.ready_s(forwards) - self.due_s
        return int(np.count_nonzero((over_s > LATE_S) & ~self.context))
