"""A client of nats-py that leaves a connection whose other end is silent, and bounds every request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

CLOSE_S = 1.0
"""Time in which an orderly close must be over, seconds."""
DRAIN_S = 3.0
"""The same for what was sent or received before, seconds."""
SLACK_S = 0.1
"""Time for a request's answer to arrive after its own time limit, seconds."""


class BrokerConnection(Client):
    """nats-py's client, which waits without limit where the broker's end of a connection is silent.

    A frozen broker, or a firewall that drops packets, leaves a connection open. Once the buffers of the
    kernel are full, nats-py neither closes such a connection nor opens another one until the kernel gives up,
    which takes minutes or forever. A late answer to a ping that was given up ends its reading task.
    """

    async def _attempt_reconnect(self) -> None:
        self._abort()
        await super()._attempt_reconnect()

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            # Whoever sent this ping has stopped waiting. The answer still proves that the broker lives.
            self._pongs.pop(0)
            self._pings_outstanding = 0
            return
        await super()._process_pong()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        task = asyncio.current_task()
        before = 0 if task is None else task.cancelling()
        result = await super()._flush_pending(force_flush)
        if task is not None and task.cancelling() > before:
            # nats-py swallows the cancellation, so a time limit would have no effect.
            raise asyncio.CancelledError
        return result

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a request and wait for its answer. The time limit includes the sending."""
        try:
            async with asyncio.timeout(timeout + SLACK_S):
                return await super().request(subject, payload, timeout, old_style, headers)
        except TimeoutError:
            raise nats.errors.TimeoutError from None

    async def drain(self) -> None:
        """End the subscriptions, send what is left, close. Raises DrainTimeoutError after `DRAIN_S`."""
        if not await _ends(super().drain(), DRAIN_S):
            raise nats.errors.DrainTimeoutError

    async def close(self) -> None:
        """Close the connection. What cannot be sent within `CLOSE_S` is lost."""
        try:
            ended = await _ends(super().close(), CLOSE_S)
        except OSError:
            ended = False
        if not ended:
            await self._give_up()

    async def _give_up(self) -> None:
        """Do what nats-py's `close` has not reached: end its tasks and subscriptions, and report the end."""
        self._abort()
        tasks = [subscription._wait_for_msgs_task for subscription in self._subs.values()]
        for task in (*tasks, self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()
        self._subs.clear()
        if self._closed_cb is not None:
            await self._closed_cb()

    def _abort(self) -> None:
        """End the connection without waiting for what is still to be sent."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


async def _ends(work: Coroutine[Any, Any, None], limit_s: float) -> bool:
    """Wait for `work`, and return whether it ended in time. If not, or if the caller is cancelled, cancel it.

    Not `wait_for`: on cancellation, nats-py waits for the broker once more.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit_s)
    finally:
        if not task.done():
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            task.cancel()
    if not task.done():
        return False
    task.result()
    return True


async def connect(servers: list[str], **options: Any) -> BrokerConnection:
    """As `nats.connect`."""
    client = BrokerConnection()
    await client.connect(servers, **options)
    return client
