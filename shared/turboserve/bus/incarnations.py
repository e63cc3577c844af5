"""Detects a new incarnation of a stream: one that was deleted and created again counts from 1."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from dataclasses import dataclass

import nats
from nats.js import JetStreamContext

from turboserve.tasks import BackgroundTasks

ASK_S = 1.0
"""Minimum interval between two questions to the broker about one stream, for all followers together."""


@dataclass(frozen=True)
class StreamIncarnation:
    """The broker's description of a stream."""

    born: datetime.datetime | None
    """When the stream was created."""
    last: int
    """Sequence of the newest message."""
    asked_at: float
    """When the question was sent, in the event loop's time, seconds."""


class StreamIncarnations:
    """The current incarnations of the streams that one process follows."""

    def __init__(self, jetstream: Callable[[], JetStreamContext]) -> None:
        self._jetstream = jetstream
        self._known: dict[str, StreamIncarnation] = {}
        self._asked_at: dict[str, float] = {}
        self._questions = BackgroundTasks()

    def look(self, stream: str) -> StreamIncarnation | None:
        """Return the newest answer, or None if there is none yet. Requests the next one without waiting."""
        now = asyncio.get_running_loop().time()
        if now >= self._asked_at.get(stream, -ASK_S) + ASK_S:
            self._asked_at[stream] = now
            self._questions.create(self._ask(stream, now))
        return self._known.get(stream)

    def close(self) -> None:
        self._questions.cancel()

    async def _ask(self, stream: str, now: float) -> None:
        try:
            info = await self._jetstream().stream_info(stream)
        except (TimeoutError, nats.errors.Error, OSError):
            # The broker is unreachable, or the stream does not exist yet. Followers call `look` again.
            return
        self._known[stream] = StreamIncarnation(info.created, info.state.last_seq, now)


class StreamPosition:
    """One follower's position in a stream. It is lost together with the stream."""

    def __init__(self, incarnations: StreamIncarnations, stream: str, after: int) -> None:
        self._incarnations, self._stream = incarnations, stream
        self._born: datetime.datetime | None = None
        self.position = after
        self._now = asyncio.get_running_loop().time
        self._began_at = self._reached_at = self._now()

    def reach(self, sequence: int) -> None:
        """Set the position: the follower has everything up to `sequence`."""
        self.position, self._reached_at = sequence, self._now()

    def lost(self) -> bool:
        """Whether the stream is another incarnation than the one of this position. If so, start at 0."""
        incarnation = self._incarnations.look(self._stream)
        if incarnation is None or incarnation.asked_at < self._began_at:
            return False
        born, self._born = self._born, incarnation.born
        # An answer that was requested before the position was reached may be too short.
        shorter = incarnation.asked_at > self._reached_at and incarnation.last < self.position
        if not shorter and born in (None, incarnation.born):
            return False
        self.reach(0)
        return True
