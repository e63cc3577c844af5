"""Durable pull consumers: at-least-once, in order, surviving restarts of either side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.js import api
from pydantic import ValidationError

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.log import Entry
from turboserve.telemetry import context_of, tracer

log = logs.get("bus")
_trace = tracer("bus")

FETCH_S = 5.0
RETRY_S = 0.5


async def consume(
    bus: Bus,
    stream: str,
    durable: str,
    subjects: list[str],
    handler: Callable[[Entry], Awaitable[None]],
    *,
    headers_only: bool = False,
    batch: int = 64,
) -> None:
    """Hand every message to `handler`, one at a time, and acknowledge it when that returns; never returns.

    A message that the handler cannot read (ValidationError) is logged and dropped for good; any other
    exception leaves it and all after it for another try, so order is kept.
    """
    config = api.ConsumerConfig(
        # Without the name, nats-py would create it on a legacy subject that services may not publish to.
        name=durable,
        durable_name=durable,
        filter_subjects=subjects,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=30,
        max_ack_pending=batch,
        headers_only=headers_only or None,
        deliver_policy=api.DeliverPolicy.ALL,
    )
    while True:
        try:
            stream_context = bus.jetstream(5.0)
            await stream_context.add_consumer(stream, config)
            subscription = await stream_context.pull_subscribe_bind(durable, stream)
            try:
                await _pump(subscription, handler, batch)
            finally:
                await subscription.unsubscribe()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.warning("consumer interrupted", stream=stream, durable=durable, error=repr(error))
        except Exception:
            log.exception("consumer failed", stream=stream, durable=durable)
        await asyncio.sleep(RETRY_S)


async def _pump(
    subscription: nats.js.JetStreamContext.PullSubscription,
    handler: Callable[[Entry], Awaitable[None]],
    batch: int,
) -> None:
    while True:
        try:
            messages = await subscription.fetch(batch, timeout=FETCH_S)
        except (TimeoutError, nats.errors.TimeoutError):
            continue
        for position, message in enumerate(messages):
            try:
                await _handle(message, handler)
            except Exception:
                for later in messages[position:]:
                    await later.nak(delay=RETRY_S)
                raise


async def _handle(message: NatsMsg, handler: Callable[[Entry], Awaitable[None]]) -> None:
    headers = message.headers or {}
    entry = Entry(message.subject, message.metadata.sequence.stream, message.data, headers)
    try:
        with _trace.start_as_current_span(f"consume {message.subject}", context=context_of(headers)):
            await handler(entry)
    except ValidationError as error:
        log.error("unreadable message dropped", subject=message.subject, error=str(error))
        await message.term()
        return
    await message.ack()
