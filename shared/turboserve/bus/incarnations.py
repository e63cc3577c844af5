"""Which life of a stream is current: a stream that was deleted and made anew counts from 1 again."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from dataclasses import dataclass

import nats
from nats.js import JetStreamContext

ASK_S = 1.0
"""The broker is asked this often at most, whatever the number of followers."""


@dataclass(frozen=True)
class StreamIncarnation:
    """A stream as the broker described it."""

    born: datetime.datetime | None
    """When it was made."""
    last: int
    """Sequence of its newest message."""
    asked_at: float
    """Seconds of the event loop; the answer is younger."""


class StreamIncarnations:
    """The lives of the streams that one process follows."""

    def __init__(self, jetstream: Callable[[], JetStreamContext]) -> None:
        self._jetstream = jetstream
        self._known: dict[str, StreamIncarnation] = {}
        self._asked_at: dict[str, float] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def look(self, stream: str) -> StreamIncarnation | None:
        """The newest answer; None: there was none yet. Never waits: the next answer is on its way."""
        now = asyncio.get_running_loop().time()
        if now >= self._asked_at.get(stream, -ASK_S) + ASK_S:
            self._asked_at[stream] = now
            asking = asyncio.create_task(self._ask(stream, now))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
        return self._known.get(stream)

    def close(self) -> None:
        for asking in self._asking:
            asking.cancel()

    async def _ask(self, stream: str, now: float) -> None:
        try:
            info = await self._jetstream().stream_info(stream)
        except (TimeoutError, nats.errors.Error, OSError):
            # Away, or not made yet: who follows it looks again.
            return
        self._known[stream] = StreamIncarnation(info.created, info.state.last_seq, now)


class StreamPosition:
    """How far one follower has got in a stream: lost with the stream."""

    def __init__(self, incarnations: StreamIncarnations, stream: str, after: int) -> None:
        self._incarnations, self._stream = incarnations, stream
        self._born: datetime.datetime | None = None
        self.position = after
        self._now = asyncio.get_running_loop().time
        self._began_at = self._reached_at = self._now()

    def reach(self, sequence: int) -> None:
        """The follower has everything up to `sequence`."""
        self.position, self._reached_at = sequence, self._now()

    def lost(self) -> bool:
        """Whether the stream is another than the one the place is in; then the place is its beginning."""
        incarnation = self._incarnations.look(self._stream)
        if incarnation is None or incarnation.asked_at < self._began_at:
            return False
        born, self._born = self._born, incarnation.born
        # An answer from before the place was reached says nothing of the stream's length.
        shorter = incarnation.asked_at > self._reached_at and incarnation.last < self.position
        if not shorter and born in (None, incarnation.born):
            return False
        self.reach(0)
        return True
