"""The receiving side of a client: messages of its subscriptions, and answers to its requests."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import nats.errors
from nats.aio.client import NO_RESPONDERS_STATUS, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import PubAck
from nats.js.errors import APIError, NoStreamResponseError
from pydantic_core import from_json

from turboserve.simulation.runtime.broker.formats import ApiError
from turboserve.simulation.runtime.broker.link import Link
from turboserve.simulation.runtime.broker.messages import Message
from turboserve.simulation.runtime.broker.stream import Appended

STATUS = "Status"
"""Header of the broker's own answers."""


class Receiver(Client):
    """nats-py's client with cheaper requests.

    Requests do without nats-py's copies of subjects and its task for each timeout. `take` does what nats-py
    does with each message that it has read.
    """

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        self._link: Link | None = None
        self._nuid = _Nuid(generator)  # type: ignore[assignment]
        self._response_sid = 0
        self._responses: dict[str, Msg | asyncio.Future[Msg] | None] = {}
        """By request: its answer, or what waits for it; None while the request is sent."""
        self._response_prefix = ""

    async def _init_request_sub(self) -> None:
        self._resp_sub_prefix = self._inbox_prefix + b"." + self._nuid.next() + b"."
        self._response_prefix = self._resp_sub_prefix.decode()
        subscription = await self.subscribe(f"{self._response_prefix}*", cb=self._request_sub_callback)
        self._response_sid = subscription._id

    async def _request_new_style(
        self,
        subject: str,
        payload: bytes,
        timeout: float = 1,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        token = self._nuid.text()  # type: ignore[attr-defined]
        responses = self._responses
        responses[token] = None
        try:
            self._send(subject, payload, f"{self._response_prefix}{token}", headers)
            if isinstance(answer := responses[token], Msg):
                return answer
            loop = asyncio.get_running_loop()
            future: asyncio.Future[Msg] = loop.create_future()
            responses[token] = future
            timer = loop.call_later(timeout, _give_up, future)
            try:
                return await future
            finally:
                timer.cancel()
        finally:
            del responses[token]

    def _send(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
        """Publish a message. `reply`: empty, or a valid subject. Raises nats-py's errors."""
        raise NotImplementedError

    def _append(
        self, subject: str, payload: bytes, headers: dict[str, str] | None
    ) -> tuple[str, Appended] | None:
        """Have a message stored while it is sent. Returns the stream and what it has stored.

        None: it must be sent as a request. Raises nats-py's errors and ApiError.
        """
        raise NotImplementedError

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task of the client's process, whichever process runs now."""
        raise NotImplementedError

    def take(self, link: Link, sid: int, message: Message) -> None:
        """Handle a message for a subscription, if the connection is still in use."""
        subscription = self._subs.get(sid)
        if subscription is None or link is not self._link:
            return
        data = message.data
        size = len(data)
        stats = self.stats
        stats["in_msgs"] += 1
        stats["in_bytes"] += size
        headers = dict(message.headers) if message.headers else None
        # By position: metadata, acknowledged, subscription.
        received = Msg(self, message.subject, message.reply, data, headers, None, False, sid)
        if sid == self._response_sid:
            token = message.subject[len(self._response_prefix) :]
            waiting = self._responses.get(token, received)
            if waiting is None:
                self._responses[token] = received
            elif isinstance(waiting, asyncio.Future) and not waiting.done():
                waiting.set_result(received)
            return
        subscription._received += 1
        if 0 < subscription._max_msgs <= subscription._received:
            self._subs.pop(sid, None)
        if subscription._future is not None:
            if not subscription._future.done():
                subscription._future.set_result(received)
            return
        if 0 < subscription._pending_bytes_limit <= subscription._pending_size + size:
            self._too_slow(subscription, received)
            return
        try:
            subscription._pending_queue.put_nowait(received)
            subscription._pending_size += size
        except asyncio.QueueFull:
            self._too_slow(subscription, received)

    def _too_slow(self, subscription: Subscription, message: Msg) -> None:
        error = nats.errors.SlowConsumerError(
            subject=message.subject, reply=message.reply, sid=subscription._id, sub=subscription
        )
        self.start_task(self._report(error))

    async def _report(self, error: Exception) -> None:
        await self._error_cb(error)


class MessageQueue(asyncio.Queue[Msg]):
    """The queue of a subscription: asyncio's, with less work for a message."""

    _joined = False
    """Whether `join` waits."""

    def put_nowait(self, item: Msg) -> None:
        queue: deque[Msg] = self._queue  # type: ignore[attr-defined]
        if 0 < self.maxsize <= len(queue):
            raise asyncio.QueueFull
        queue.append(item)
        self._unfinished_tasks: int = self._unfinished_tasks + 1
        getters: deque[asyncio.Future[None]] = self._getters  # type: ignore[attr-defined]
        while getters:
            getter = getters.popleft()
            if not getter.done():
                getter.set_result(None)
                break

    def task_done(self) -> None:
        if self._unfinished_tasks <= 0:
            raise ValueError("task_done() called too many times")
        self._unfinished_tasks -= 1
        if not self._unfinished_tasks and self._joined:
            self._joined = False
            self._finished.set()  # type: ignore[attr-defined]

    async def join(self) -> None:
        if self._unfinished_tasks > 0:
            # Each message would set and reset the event. Only a wait needs it.
            self._joined = True
            finished: asyncio.Event = self._finished  # type: ignore[attr-defined]
            finished.clear()
            await finished.wait()

    async def get(self) -> Msg:
        queue: deque[Msg] = self._queue  # type: ignore[attr-defined]
        if not queue:
            getters: deque[asyncio.Future[None]] = self._getters  # type: ignore[attr-defined]
            loop = asyncio.get_running_loop()
            while not queue:
                getter: asyncio.Future[None] = loop.create_future()
                getters.append(getter)
                try:
                    await getter
                except BaseException:
                    self._stop_getting(getter)
                    raise
        # No call of `put` waits: nats-py drops messages for which there is no room.
        return queue.popleft()

    def _stop_getting(self, getter: asyncio.Future[None]) -> None:
        """Give up a wait, as `asyncio.Queue.get` does: a message that it was woken for wakes another."""
        getter.cancel()
        with suppress(ValueError):
            self._getters.remove(getter)  # type: ignore[attr-defined]
        if not self.empty() and not getter.cancelled():
            self._wakeup_next(self._getters)  # type: ignore[attr-defined]


class MemoryJetStream(JetStreamContext):
    """nats-py's JetStream client, with less work for each acknowledgement."""

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float | None = None,
        stream: str | None = None,
        headers: dict[str, Any] | None = None,
        msg_ttl: float | None = None,
    ) -> PubAck:
        if stream is not None or msg_ttl is not None:
            return await super().publish(subject, payload, timeout, stream, headers, msg_ttl)
        client = self._nc
        assert isinstance(client, Receiver)
        try:
            stored = client._append(subject, payload, headers)
        except ApiError as error:
            raise APIError.from_error(error.body()) from None
        if stored is not None:
            name, appended = stored
            return PubAck(name, appended.sequence, None, True if appended.stored is None else None)
        answer = await client._request_new_style(
            subject, payload, self._timeout if timeout is None else timeout, headers
        )
        if answer.headers and answer.headers.get(STATUS) == NO_RESPONDERS_STATUS:
            raise NoStreamResponseError
        body = from_json(answer.data)
        if "error" in body:
            raise APIError.from_error(body["error"])
        return PubAck(body["stream"], body["seq"], body.get("domain"), body.get("duplicate"))


class _Nuid:
    """Unique ids of 22 characters, as nats-py's, from the broker's generator."""

    def __init__(self, generator: random.Random) -> None:
        self._prefix = f"{generator.randrange(10**12):012d}"
        self._number = 0

    def next(self) -> bytearray:
        return bytearray(self.text(), "ascii")

    def text(self) -> str:
        """Return the next id, as text."""
        self._number += 1
        return f"{self._prefix}{self._number:010d}"


def _give_up(future: asyncio.Future[Msg]) -> None:
    if not future.done():
        future.set_exception(nats.errors.TimeoutError())
