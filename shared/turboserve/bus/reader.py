"""Reads several logs of one stream in order, from a position that the reader stores.

As `follow`, a reader gets stored messages by direct gets and new messages as the stream republishes them. A
republished message names the sequence before it on its own subject only. A reader of many subjects therefore
compares sequences of the stream. Where a sequence is missing, the log tells whether the message was lost,
belongs to another subject, or was deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.incarnations import StreamPosition
from turboserve.bus.log import QUIET_S, Entry
from turboserve.bus.pages import read_page
from turboserve.contracts.errors import UnavailableError
from turboserve.subjects import Log

log = logs.get("bus")

RETRY_S = 0.2
BACKLOG = 1_024
"""Live messages that are kept for a busy reader. Further messages are read from the log."""


async def read(
    bus: Bus, sources: Sequence[Log], after: int, *, batch: int = 512
) -> AsyncGenerator[list[Entry], None]:
    """Yield all messages of `sources` after stream sequence `after`, in order, each once, in batches.

    The iteration never ends. `sources` are logs of one stream. Nothing is acknowledged, and the broker stores
    no position. Survives broker restarts and lost live messages. A stream that was created again, or that is
    shorter than the position of this reader, is noticed within a few seconds and read from its beginning.
    Messages stored before that was noticed may come twice.
    """
    [stream] = {source.stream for source in sources}
    live = _Live(BACKLOG)
    place = StreamPosition(bus.incarnations, stream, after)
    try:
        for source in sources:
            await live.listen(bus, source)
        caught_up = False
        while True:
            if place.lost():
                log.warning("stream replaced: reading from its beginning", stream=stream)
                caught_up = False
                live.clear()
            if not caught_up:
                # Messages received before this request are in the log, or were deleted from it.
                stored_up_to = live.first
                try:
                    page = await read_page(bus, stream, place.position + 1, batch)
                except UnavailableError as error:
                    log.debug("reader delayed", stream=stream, position=place.position, error=error.detail)
                    await asyncio.sleep(RETRY_S)
                    continue
                if page.entries:
                    place.reach(page.entries[-1].sequence)
                caught_up = page.complete
                if caught_up and stored_up_to is not None and stored_up_to > place.position + 1:
                    place.reach(stored_up_to - 1)
                if entries := [entry for entry in page.entries if _is_of(sources, entry)]:
                    yield entries
                continue
            entries = live.take(place.position, batch)
            if entries:
                place.reach(entries[-1].sequence)
                yield entries
            else:
                # A gap, dropped messages, or silence: only the log shows what is missing.
                caught_up = live.first is None and not live.dropped and await live.wait(QUIET_S)
                live.dropped = False
    finally:
        await live.close()


class _Live:
    """A queue of republished messages, oldest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: deque[Entry] = deque()
        self._arrived = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self.dropped = False
        """Whether messages were dropped because the queue was full."""

    @property
    def first(self) -> int | None:
        """Sequence of the oldest message in the queue. None: the queue is empty."""
        return self._entries[0].sequence if self._entries else None

    async def listen(self, bus: Bus, source: Log) -> None:
        self._subscriptions.append(await bus.client.subscribe(source.live("*"), cb=self._receive))

    def take(self, after: int, limit: int) -> list[Entry]:
        """Take at most `limit` messages that follow sequence `after` without a gap. Drop older messages."""
        found: list[Entry] = []
        while self._entries and len(found) < limit:
            sequence = self._entries[0].sequence
            if sequence > after + 1:
                break
            entry = self._entries.popleft()
            if sequence == after + 1:
                found.append(entry)
                after = sequence
        return found

    async def wait(self, limit_s: float) -> bool:
        """Wait for a message. Returns whether one arrived within `limit_s` seconds."""
        self._arrived.clear()
        if self._entries:
            return True
        try:
            # Not wait_for: before Python 3.12 it can swallow a cancellation.
            async with asyncio.timeout(limit_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    def clear(self) -> None:
        self._entries.clear()

    async def close(self) -> None:
        for subscription in self._subscriptions:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def _receive(self, raw: NatsMsg) -> None:
        if len(self._entries) >= self._limit:
            self.dropped = True
            return
        headers = raw.headers or {}
        self._entries.append(Entry(headers["Nats-Subject"], int(headers["Nats-Sequence"]), raw.data, headers))
        self._arrived.set()


def _is_of(sources: Sequence[Log], entry: Entry) -> bool:
    return any(source.takes(entry.subject) for source in sources)
