"""Reading several logs of one stream in order from a position that the reader keeps.

As `follow`, a reader takes history by direct gets and the present from republished messages. Those name the
sequence before them on their own subject only, so a reader of many subjects compares sequences of the stream:
where one is missing, the log says whether it is a lost message, another subject's, or deleted.
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
"""Live messages that are held for a reader who is busy; what comes on top is read from the log."""


async def read(
    bus: Bus, sources: Sequence[Log], after: int, *, batch: int = 512
) -> AsyncGenerator[list[Entry], None]:
    """All messages of `sources` after stream sequence `after`, in order, each once, in batches, for ever.

    `sources` are logs of one stream. Nothing is acknowledged and the broker remembers nothing. Survives
    broker restarts and lost live messages. A stream that was deleted and made anew, or that is not as long as
    the position that was reached in it, is noticed within a few seconds and read from its beginning. Messages
    that came while nothing was noticed yet may come twice.
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
                # Whatever was heard before the question is in the log, or was deleted from it.
                stored_up_to = live.first
                try:
                    page = await read_page(bus, stream, place.position + 1, batch)
                except UnavailableError as error:
                    log.debug("reader waits", stream=stream, position=place.position, error=error.detail)
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
                # A hole, messages that were dropped here, or silence: only the log can tell what is missing.
                caught_up = live.first is None and not live.dropped and await live.wait(QUIET_S)
                live.dropped = False
    finally:
        await live.close()


class _Live:
    """Republished messages as they come, oldest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: deque[Entry] = deque()
        self._arrived = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self.dropped = False
        """Whether messages came for which there was no room."""

    @property
    def first(self) -> int | None:
        """Sequence of the oldest one that is held."""
        return self._entries[0].sequence if self._entries else None

    async def listen(self, bus: Bus, source: Log) -> None:
        self._subscriptions.append(await bus.client.subscribe(source.live("*"), cb=self._receive))

    def take(self, after: int, limit: int) -> list[Entry]:
        """At most `limit` that follow stream sequence `after` without a hole; older ones are dropped."""
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
        """Whether something came within `limit_s`."""
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
