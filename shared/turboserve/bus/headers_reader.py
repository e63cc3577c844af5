"""Reads the headers of a log in order through a consumer. Only the state store may create consumers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
from collections.abc import AsyncGenerator, Sequence

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.js import JetStreamContext, api

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.log import Entry

log = logs.get("bus")

FETCH_S = 5.0
"""Time for which the broker holds a request until messages arrive, seconds."""
ANSWER_S = 1.0
"""Additional time allowed for the answer, seconds."""
RETRY_S = 0.5
INACTIVE_S = 60.0


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
            await asyncio.sleep(RETRY_S)


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
                sequence = message.metadata.sequence
                if sequence.consumer <= delivered:
                    continue
                if sequence.consumer > delivered + 1:
                    gap = True
                    break
                delivered += 1
                asked_for -= 1
                entries.append(Entry(message.subject, sequence.stream, message.data, headers))
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
