"""Reads several logs of one stream in order, from a position that the reader stores.

As `follow`, a reader gets stored messages by direct gets and new messages as the stream republishes them. A
republished message names the sequence before it on its own subject only. A reader of many subjects therefore
compares sequences of the stream. Where a sequence is missing, the log tells whether the message was lost,
belongs to another subject, or was deleted.

`read_headers` reads only headers, through a consumer. Only the state store may create consumers.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.feeds import StreamPosition
from turboserve.bus.follower import QUIET_S
from turboserve.bus.log import Entry, Lag
from turboserve.bus.pages import read_page
from turboserve.contracts.errors import UnavailableError
from turboserve.subject_types import Log

log = logs.get("bus")

RETRY_S = 0.2
BACKLOG = 1_024
"""Live messages that are kept for a busy reader. Further messages are read from the log."""
FETCH_S = 5.0
"""Time for which the broker holds a request until messages arrive, seconds."""
ANSWER_S = 1.0
"""Additional time allowed for the answer, seconds."""
REPLY_TOKENS = 9
"""Tokens of a message's reply subject, `$JS.ACK.STREAM.CONSUMER.…`, of a broker without domains."""
CONSUMER_RETRY_S = 0.5
INACTIVE_S = 60.0


async def read(
    bus: Bus, sources: Sequence[Log], after: int, *, batch: int = 512, lag: Lag | None = None
) -> AsyncGenerator[list[Entry], None]:
    """Yield all messages of `sources` after stream sequence `after`, in order, each once, in batches.

    `lag` notes whether the reader is up to date.

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
            if lag is not None:
                lag.note(not caught_up, asyncio.get_running_loop().time())
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


class _GapError(Exception):
    """Messages were lost in transit to this reader. The log still has them: read again."""


async def read_headers(
    bus: Bus, stream: str, subjects: Sequence[str], after: int, *, batch: int = 256
) -> AsyncGenerator[list[Entry]]:
    """As `read`, without the messages' bodies: direct gets cannot leave them out, and chunks are large.

    Nothing is acknowledged, and the broker stores no position. A reader can store the sequence of each
    message in the transaction that processes the message, and continue exactly from there. Survives broker
    restarts. A stream that was created again, or that is shorter than `after`, is read from its beginning.
    """
    position = after
    born: datetime.datetime | None = None
    while True:
        try:
            jetstream = bus.jetstream(5.0)
            info = await jetstream.stream_info(stream)
            last, before, born = info.state.last_seq, born, info.created
            if last < position or before not in (None, born):
                log.warning("log replaced", stream=stream, length=last, position=position)
                position = 0
            async with contextlib.aclosing(
                _batches(bus, jetstream, stream, subjects, position, batch)
            ) as batches:
                async for entries in batches:
                    position = entries[-1].sequence
                    yield entries
        except _GapError:
            log.warning("lost messages are read again from the log", stream=stream, position=position)
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.warning("reader interrupted", stream=stream, position=position, error=repr(error))
            await asyncio.sleep(CONSUMER_RETRY_S)


async def _batches(
    bus: Bus, jetstream: JetStreamContext, stream: str, subjects: Sequence[str], after: int, batch: int
) -> AsyncGenerator[list[Entry], None]:
    inbox = bus.client.new_inbox()
    # The last token is unique to this inbox.
    name = f"reader_{inbox.rpartition('.')[2]}"
    await jetstream.add_consumer(
        stream,
        api.ConsumerConfig(
            name=name,
            filter_subjects=list(subjects),
            ack_policy=api.AckPolicy.NONE,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            headers_only=True,
            inactive_threshold=INACTIVE_S,
            mem_storage=True,
        ),
    )
    arrived: asyncio.Queue[NatsMsg] = asyncio.Queue()
    subscription = await bus.client.subscribe(inbox, cb=arrived.put)
    request = json.dumps({"batch": batch, "expires": int(FETCH_S * 1e9)}).encode()
    # nats-py's own `fetch` creates a task per message, and measures time by another clock than the loop's.
    delivered = asked_for = 0
    try:
        while True:
            if asked_for <= 0:
                await bus.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", request, reply=inbox)
                asked_for = batch
            messages: list[NatsMsg] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FETCH_S + ANSWER_S):
                    messages.append(await arrived.get())
            while not arrived.empty():
                messages.append(arrived.get_nowait())
            entries: list[Entry] = []
            ended, gap = not messages, False
            for message in messages:
                headers = message.headers or {}
                if not message.reply:
                    # This is a status of the broker. A stored message may have its own header `Status`.
                    ended = True
                    continue
                in_stream, in_consumer = _sequences(message)
                if in_consumer <= delivered:
                    continue
                if in_consumer > delivered + 1:
                    gap = True
                    break
                delivered += 1
                asked_for -= 1
                entries.append(Entry(message.subject, in_stream, message.data, headers))
            if entries:
                yield entries
            if gap:
                raise _GapError
            if ended:
                # The request expired, its answer was lost, or a restart of the broker removed the consumer.
                info = await jetstream.consumer_info(stream, name)
                if info.delivered is not None and info.delivered.consumer_seq > delivered and arrived.empty():
                    raise _GapError
                asked_for = 0
    finally:
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()


def _sequences(message: NatsMsg) -> tuple[int, int]:
    """Return the message's sequences in the stream and in the consumer.

    nats-py reads the whole reply subject, its time as a date included.
    """
    tokens = message.reply.split(".")
    if len(tokens) == REPLY_TOKENS:
        return int(tokens[5]), int(tokens[6])
    sequence = message.metadata.sequence
    return sequence.stream, sequence.consumer
