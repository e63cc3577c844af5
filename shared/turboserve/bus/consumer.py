"""Durable pull consumers: at-least-once, in order, surviving restarts of either side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import nats
from nats.aio.msg import Msg as NatsMsg
from nats.js import api
from pydantic import ValidationError

from turboserve import logs
from turboserve.bus.client import Bus
from turboserve.bus.log import Entry
from turboserve.contracts.errors import TurboServeError
from turboserve.telemetry import context_of, tracer

log = logs.get("bus")
_trace = tracer("bus")

FETCH_S = 5.0
ACK_WAIT_S = 6.0
RETRY_S = 0.5


async def consume(
    bus: Bus,
    stream: str,
    durable: str,
    subjects: list[str],
    handler: Callable[[Entry], Awaitable[None]],
    *,
    headers_only: bool = False,
) -> None:
    """Hand every message to `handler`, one at a time, and acknowledge it when that returns; never returns.

    A message that the handler cannot read (ValidationError) is logged and dropped for good. Any other
    exception keeps it, and all after it, until the handler takes it: the order is kept, also when this
    process dies over a message, which then comes again after `ACK_WAIT_S`.
    """
    config = api.ConsumerConfig(
        # Without the name, nats-py would create it on a legacy subject that services may not publish to.
        name=durable,
        durable_name=durable,
        filter_subjects=subjects,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        # One at a time: of several on their way, a broker gives back the unanswered ones behind newer ones.
        max_ack_pending=1,
        headers_only=headers_only or None,
        deliver_policy=api.DeliverPolicy.ALL,
    )
    while True:
        try:
            stream_context = bus.jetstream(5.0)
            await stream_context.add_consumer(stream, config)
            subscription = await stream_context.pull_subscribe_bind(durable, stream)
            try:
                await _pump(subscription, handler)
            finally:
                await subscription.unsubscribe()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.warning("consumer interrupted", stream=stream, durable=durable, error=repr(error))
        await asyncio.sleep(RETRY_S)


async def _pump(
    subscription: nats.js.JetStreamContext.PullSubscription, handler: Callable[[Entry], Awaitable[None]]
) -> None:
    while True:
        try:
            messages = await subscription.fetch(1, timeout=FETCH_S)
        except (TimeoutError, nats.errors.TimeoutError):
            # Silence, or a consumer that is gone: only the broker can tell.
            await subscription.consumer_info()
            continue
        for message in messages:
            beat = asyncio.create_task(_keep(message))
            try:
                await _handle(message, handler)
            finally:
                beat.cancel()


async def _keep(message: NatsMsg) -> None:
    """Tell the broker that the message is still being worked on."""
    while True:
        await asyncio.sleep(ACK_WAIT_S / 3)
        with suppress(nats.errors.Error, OSError):
            await message.in_progress()


async def _handle(message: NatsMsg, handler: Callable[[Entry], Awaitable[None]]) -> None:
    headers = message.headers or {}
    entry = Entry(message.subject, message.metadata.sequence.stream, message.data, headers)
    while True:
        try:
            with _trace.start_as_current_span(f"consume {message.subject}", context=context_of(headers)):
                await handler(entry)
        except ValidationError as error:
            log.error("unreadable message dropped", subject=message.subject, error=str(error))
            await message.term()
            return
        except TurboServeError as error:
            log.warning("message is tried again", subject=message.subject, error=error.detail)
        except Exception:
            log.exception("message is tried again", subject=message.subject)
        else:
            await message.ack()
            return
        await asyncio.sleep(RETRY_S)
