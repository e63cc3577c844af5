"""Reading the headers of a log in order, by a consumer: only the state store may make one."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncGenerator, Sequence

import nats
from nats.js import JetStreamContext, api

from turboserve import ids, logs
from turboserve.bus.client import Bus
from turboserve.bus.log import Entry

log = logs.get("bus")

FETCH_S = 5.0
RETRY_S = 0.5
INACTIVE_S = 60.0


class _Gap(Exception):
    """Messages were lost on the way to this reader: the log still has them."""


async def read_headers(
    bus: Bus, stream: str, subjects: Sequence[str], after: int, *, batch: int = 256
) -> AsyncGenerator[list[Entry]]:
    """As `read`, without the messages' bodies: direct gets cannot leave them out, and chunks are large.

    Nothing is acknowledged and the broker remembers nothing: a reader that stores the sequence of what it has
    processed, in the transaction that processed it, goes on from there exactly. Survives broker restarts. A
    stream that was made anew meanwhile, or is not as long as `after`, is read from its beginning.
    """
    position = after
    born: datetime.datetime | None = None
    while True:
        try:
            jetstream = bus.jetstream(5.0)
            info = await jetstream.stream_info(stream)
            last, before, born = info.state.last_seq, born, info.created
            if last < position or before not in (None, born):
                log.warning("the log is another", stream=stream, length=last, position=position)
                position = 0
            async with contextlib.aclosing(_batches(jetstream, stream, subjects, position, batch)) as batches:
                async for entries in batches:
                    position = entries[-1].sequence
                    yield entries
        except _Gap:
            log.warning("messages lost on the way are read again", stream=stream, position=position)
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.warning("reader interrupted", stream=stream, position=position, error=repr(error))
            await asyncio.sleep(RETRY_S)


async def _batches(
    jetstream: JetStreamContext, stream: str, subjects: Sequence[str], after: int, batch: int
) -> AsyncGenerator[list[Entry]]:
    name = ids.new_id("reader")
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
    subscription = await jetstream.pull_subscribe_bind(name, stream)
    delivered = 0
    try:
        while True:
            try:
                messages = await subscription.fetch(batch, timeout=FETCH_S)
            except (TimeoutError, nats.errors.TimeoutError):
                # Silence, or a consumer that a restart of the broker took away: only it can tell.
                await jetstream.consumer_info(stream, name)
                continue
            entries: list[Entry] = []
            for message in messages:
                sequence = message.metadata.sequence
                delivered += 1
                if sequence.consumer != delivered:
                    raise _Gap
                entries.append(Entry(message.subject, sequence.stream, message.data, message.headers or {}))
            if entries:
                yield entries
    finally:
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()
