"""Follows one subject of a stream without gaps.

A follower gets stored messages by direct gets, and new messages as the stream republishes them. Each
republished message names the sequence before it on its subject. The follower thus notices a lost message and
fetches it, and needs no consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

import nats
from nats.aio.msg import Msg as NatsMsg

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.incarnations import StreamPosition
from turboserve.bus.log import Entry, next_entry
from turboserve.contracts.errors import UnavailableError

log = logs.get("bus")

LIVE = "live."
"""Prefix of the subject of a republished message."""
QUIET_S = 1.5
"""Silence after which a follower asks the log for missed messages. Doubles with every question in a row."""
QUIET_LIMIT_S = 6.0
"""Upper bound of that silence. A live message reveals a missed message at once."""
BACKLOG = 4
"""Live messages that a follower keeps for a busy reader. Further messages are read from the log."""


async def follow(
    bus: Bus,
    stream: str,
    subject: str,
    live: str,
    *,
    after_sequence: int = 0,
    on_lost: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[Entry, None]:
    """Yield all messages on `subject` after stream sequence `after_sequence`, each once, in order, forever.

    `subject` and `live` may be patterns. A live message names the message before it on its own subject. A
    live message on another subject than the previous message is therefore read from the log.

    Survives broker restarts and lost live messages. Messages that the stream no longer keeps are skipped, so
    readers of chunks check that indices are contiguous. A slow reader costs at most `BACKLOG` messages in
    memory.

    A stream counts as replaced if it was deleted and created again, if it is shorter than this reader's
    position, or if a new connection shows that it no longer has the newest message that was read: a broker
    lost its disk or the newest part of it. A replacement is noticed within a few seconds. `on_lost` is then
    awaited, and an exception from it ends the iteration. Afterwards the stream is read from its beginning,
    with sequences that start again. Messages stored before the replacement was noticed may come twice.
    """
    backlog = _Backlog()

    async def receive(raw: NatsMsg) -> None:
        headers = raw.headers or {}
        backlog.put(Entry(raw.subject.removeprefix(LIVE), int(headers["Nats-Sequence"]), raw.data, headers))

    subscription = await bus.client.subscribe(live, cb=receive)
    place = StreamPosition(bus.incarnations, stream, after_sequence)
    checked = bus.connection
    """Connection over which the stream had the newest message that was read."""
    last: str | None = None
    quiet_s = QUIET_S
    newest = subject
    """Subject of the previous message."""
    announced = 0
    """Sequence of the live message that made this reader read the log."""
    try:
        caught_up = False
        while True:
            connection = bus.connection
            lost = place.lost()
            if not lost and connection is not None and connection != checked:
                try:
                    lost = not await _has(bus, stream, subject, place.position, last)
                except UnavailableError:
                    await asyncio.sleep(0.2)
                    continue
                checked = connection
            if lost:
                log.warning("stream replaced: reading from its beginning", stream=stream, subject=subject)
                place.reach(0)
                last, announced, caught_up = None, 0, False
                backlog.clear()
                if on_lost is not None:
                    await on_lost()
            if not caught_up:
                try:
                    entry = await next_entry(bus, stream, subject, place.position + 1)
                except UnavailableError:
                    await asyncio.sleep(0.2)
                    continue
                if bus.connection not in (None, checked):
                    continue
                if entry is None:
                    caught_up = True
                    continue
                place.reach(entry.sequence)
                last = _stamp(entry)
                quiet_s, newest = QUIET_S, entry.subject
                caught_up = entry.sequence == announced
                yield entry
                continue
            if backlog.dropped and not backlog:
                backlog.dropped = caught_up = False
                continue
            entry = await backlog.get(quiet_s)
            if entry is None:
                caught_up, quiet_s = False, min(2 * quiet_s, QUIET_LIMIT_S)
                continue
            quiet_s = QUIET_S
            if bus.connection not in (None, checked):
                # The log has this message, unless it was lost: see above.
                caught_up = False
                continue
            if entry.sequence <= place.position:
                continue
            before = int(entry.headers.get("Nats-Last-Sequence", "0"))
            if before > place.position or entry.subject != newest:
                # A message before this one may be lost in transit, or deleted: continue from the log.
                caught_up, announced = False, entry.sequence
                continue
            place.reach(entry.sequence)
            last = _stamp(entry)
            yield entry
    finally:
        backlog.close()
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()


class _Backlog:
    """Live messages that wait for their reader, at most `BACKLOG`.

    Costs less than `asyncio.Queue` with a timeout for each message: one timer serves many messages, and
    looks at its time whether the reader waits for longer.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        """End of the reader's wait."""
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = False
        """Whether there was no room for a message."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    def clear(self) -> None:
        """Drop all messages."""
        self._entries.clear()

    def put(self, entry: Entry) -> None:
        """Add a message, if there is room."""
        if len(self._entries) >= BACKLOG:
            self.dropped = True
            return
        self._entries.append(entry)
        self._wake()

    async def get(self, limit_s: float) -> Entry | None:
        """Return the oldest message; None if none comes within `limit_s` seconds."""
        if not self._entries:
            self._deadline = self._loop.time() + limit_s
            if self._timer is None or self._timer.when() > self._deadline:
                self.close()
                self._timer = self._loop.call_at(self._deadline, self._look)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._entries.popleft() if self._entries else None

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._look)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _stamp(entry: Entry) -> str:
    """Return what differs between two messages of one sequence, before and after a loss."""
    return f"{entry.subject} {entry.headers.get('Nats-Msg-Id')}"


async def _has(bus: Bus, stream: str, subject: str, sequence: int, stamp: str | None) -> bool:
    """Whether the stream has the message of `sequence`, with `stamp` if that is known.

    False also if it was removed since. Reading from the beginning is right then, too. Raises
    UnavailableError.
    """
    if sequence == 0:
        return True
    entry = await next_entry(bus, stream, subject, sequence)
    return entry is not None and entry.sequence == sequence and stamp in (None, _stamp(entry))
