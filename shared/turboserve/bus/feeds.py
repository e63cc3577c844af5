"""What the followers of one process share: live subscriptions, and the incarnations of streams.

A stream that was deleted and created again is a new incarnation: it counts from 1.
"""

from __future__ import annotations

import asyncio
import datetime
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from turboserve.bus.port import BrokerClient
from turboserve.tasks import BackgroundTasks

BACKLOG = 4
"""Live messages that a follower keeps for a busy reader. Further messages are read from the log."""

T = TypeVar("T")

LOOK_S = 0.25
"""Time between two looks at the readers' waits, seconds."""
SHORTEST_WAIT_S = 1.0
"""Shortest wait of a reader, seconds: the looks in between need not ask each reader."""
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


class Backlog(Generic[T]):
    """Live messages that wait for their reader, at most `BACKLOG`.

    Costs less than `asyncio.Queue` with a timeout for each message: one timer of the process looks at the
    waits of all readers.
    """

    def __init__(self) -> None:
        self._entries: deque[T] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.deadline = math.inf
        """End of the reader's wait; infinity while it does not wait."""
        self.dropped = False
        """Whether there was no room for a message. None is added until the reader sets it back, so that none
        is missing between two of the backlog."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def first(self) -> T | None:
        """The oldest message, which stays. None: there is none."""
        return self._entries[0] if self._entries else None

    def drop_first(self) -> None:
        """Drop the oldest message."""
        self._entries.popleft()

    def clear(self) -> None:
        """Drop all messages."""
        self._entries.clear()

    def put(self, entry: T) -> None:
        """Add a message, if there is room."""
        if self.dropped or len(self._entries) >= BACKLOG:
            self.dropped = True
            return
        self._entries.append(entry)
        self.wake()

    async def get(self, limit_s: float) -> T | None:
        """Return the oldest message; None if none comes within `limit_s` seconds, or up to `LOOK_S` more.

        `limit_s`: at least `SHORTEST_WAIT_S`.
        """
        if not self._entries:
            self.deadline = self._loop.time() + limit_s
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter, self.deadline = None, math.inf
        return self._entries.popleft() if self._entries else None

    def wake(self) -> None:
        """End the reader's wait, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LiveFeeds:
    """The live subscriptions of one process. However many followers a subject has, it has one subscription.

    A message goes to every follower's backlog, which is bounded and never waits for its reader.
    """

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self._feeds: dict[str, _Feed] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._earliest = -math.inf
        """No reader's wait ends before this time."""
        self._questions: dict[Hashable, asyncio.Future[Any]] = {}

    @asynccontextmanager
    async def joined(
        self, live: str, backlog: Backlog[T], parse: Callable[[NatsMsg], T]
    ) -> AsyncIterator[None]:
        """Put the messages on `live` into `backlog` during the block.

        Every message that the broker sends after the block began reaches it, or a new connection shows that
        messages were lost.
        """
        feed = self._feeds.get(live)
        if feed is None:
            feed = self._feeds[live] = _Feed(parse)
            feed.subscription = asyncio.ensure_future(self._client.subscribe(live, cb=feed.receive))
        feed.backlogs[backlog] = None
        if self._timer is None:
            self._look()
        try:
            await asyncio.shield(feed.subscription)
            yield
        finally:
            del feed.backlogs[backlog]
            if not feed.backlogs:
                del self._feeds[live]
                with suppress(nats.errors.Error, OSError):
                    await (await feed.subscription).unsubscribe()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= self._earliest:
            # Waits that begin after this look end after `SHORTEST_WAIT_S` or later.
            earliest = now + SHORTEST_WAIT_S
            for feed in self._feeds.values():
                for backlog in feed.backlogs:
                    deadline = backlog.deadline
                    if now >= deadline:
                        backlog.wake()
                    elif deadline < earliest:
                        earliest = deadline
            self._earliest = earliest
        self._timer = loop.call_later(LOOK_S, self._look) if self._feeds else None

    async def shared(self, key: Hashable, question: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to `question`. While one with an equal `key` is under way, its answer."""
        while (asked := self._questions.get(key)) is not None:
            await asyncio.wait((asked,))
            if not asked.cancelled():
                found: T = asked.result()
                return found
            # Whoever asked has left.
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._questions[key] = answered
        try:
            answer = await question()
        except Exception as error:
            answered.set_exception(error)
            # No other follower may be waiting for it.
            answered.exception()
            raise
        except BaseException:
            answered.cancel()
            raise
        else:
            answered.set_result(answer)
            return answer
        finally:
            del self._questions[key]


class _Feed:
    """One subscription and the backlogs of its followers."""

    subscription: asyncio.Future[Subscription]

    def __init__(self, parse: Callable[[NatsMsg], Any]) -> None:
        self._parse = parse
        self.backlogs: dict[Backlog[Any], None] = {}

    async def receive(self, raw: NatsMsg) -> None:
        message = self._parse(raw)
        for backlog in self.backlogs:
            backlog.put(message)
