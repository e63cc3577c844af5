"""nats-py's client on a connection in memory."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from random import Random
from typing import Any, Protocol

import nats.errors
from nats.aio.client import (
    DEFAULT_DRAIN_TIMEOUT,
    DEFAULT_PENDING_SIZE,
    NO_RESPONDERS_STATUS,
    Client,
    ServerVersion,
    _validate_subject,
)
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import StaleConnectionError, UnexpectedEOF
from nats.js.api import Header

from turboserve.simulation.runtime.broker.appends import AppendingBroker, append
from turboserve.simulation.runtime.broker.formats import as_received
from turboserve.simulation.runtime.broker.handlers import HandlerQueue
from turboserve.simulation.runtime.broker.link import Link
from turboserve.simulation.runtime.broker.messages import Message
from turboserve.simulation.runtime.broker.receiver import MemoryJetStream, MessageQueue, Receiver
from turboserve.simulation.runtime.broker.stream import Appended
from turboserve.simulation.runtime.process import Process, enter

SERVER_VERSION = "2.15.1"
"""Version of nats-server that the broker imitates and that the tests compare it with."""
KNOWN_SUBJECTS = 4_096

Callback = Callable[[], Awaitable[None]]
ErrorCallback = Callable[[Exception], Awaitable[None]]


class ListeningBroker(AppendingBroker, Protocol):
    """The broker as its clients know it."""

    random: Random
    loop: asyncio.AbstractEventLoop
    max_payload: int

    async def accept(self, client: MemoryClient, timeout_s: float) -> Link:
        """Open a connection. Raises ConnectionRefusedError, or TimeoutError if the broker does not answer."""


class MemoryClient(Receiver):
    """`nats.aio.client.Client` whose socket is a `Link`.

    nats-py's own code handles everything but the socket: subscriptions and their tasks, pings, draining,
    closing, JetStream. `publish`, `request`, `flush` and reconnecting are reimplemented here without bytes,
    with nats-py's limits and errors. Every call raises `ProcessDeadError` once the client's process was
    killed.
    """

    def __init__(self, broker: ListeningBroker, process: Process | None) -> None:
        super().__init__(broker.random)
        self.process = process
        self._broker = broker
        self._buffer: list[Message] = []
        """Messages published while there was no connection."""
        self._known_subjects: set[str] = set()

    def __repr__(self) -> str:
        return f"MemoryClient({self.options.get('name')!r})"

    # Connecting

    async def connect(  # type: ignore[override]
        self,
        servers: object = None,
        *,
        error_cb: ErrorCallback | None = None,
        disconnected_cb: Callback | None = None,
        closed_cb: Callback | None = None,
        reconnected_cb: Callback | None = None,
        name: str | None = None,
        allow_reconnect: bool = True,
        connect_timeout: float = 2,
        reconnect_time_wait: float = 2,
        ping_interval: float = 120,
        max_outstanding_pings: int = 2,
        drain_timeout: float = DEFAULT_DRAIN_TIMEOUT,
        inbox_prefix: str | bytes = b"_INBOX",
        pending_size: int = DEFAULT_PENDING_SIZE,
        **_: Any,
    ) -> None:
        """Connect, with retries unless `allow_reconnect` is false. The options are nats-py's.

        Users, passwords and the number of attempts have no effect here.
        """
        for callback in (error_cb, disconnected_cb, closed_cb, reconnected_cb):
            if callback is not None and not inspect.iscoroutinefunction(callback):
                raise nats.errors.InvalidCallbackTypeError
        self._error_cb = error_cb or self._error_cb
        self._disconnected_cb, self._reconnected_cb = disconnected_cb, reconnected_cb
        self._closed_cb = closed_cb
        prefix = inbox_prefix.encode() if isinstance(inbox_prefix, str) else inbox_prefix
        self._inbox_prefix = bytearray(prefix)
        self._max_pending_size = pending_size
        self._max_payload = self._broker.max_payload
        self.options = {
            "name": name,
            "allow_reconnect": allow_reconnect,
            "connect_timeout": connect_timeout,
            "reconnect_time_wait": reconnect_time_wait,
            "ping_interval": ping_interval,
            "max_outstanding_pings": max_outstanding_pings,
            "drain_timeout": drain_timeout,
        }
        while True:
            try:
                await self._open_link()
                return
            except OSError as error:
                await self._error_cb(error)
                if not allow_reconnect:
                    raise
                await asyncio.sleep(reconnect_time_wait)

    async def _open_link(self) -> None:
        """Open a link. Raises ConnectionRefusedError, or TimeoutError after `connect_timeout`."""
        self._check_alive()
        self._status = Client.CONNECTING if self._status != Client.RECONNECTING else self._status
        self._link = await self._broker.accept(self, self.options["connect_timeout"])
        self._status = Client.CONNECTED
        self._pongs = []
        self._pings_outstanding = 0
        self._ping_interval_task = asyncio.get_running_loop().create_task(self._ping_interval())

    async def _attempt_reconnect(self) -> None:
        self._close_link()
        if self._disconnected_cb is not None:
            await self._disconnected_cb()
        while not self.is_closed:
            try:
                await self._open_link()
                self.stats["reconnects"] += 1
                assert self._link is not None
                for sid, subscription in list(self._subs.items()):
                    self._link.subscribe(sid, subscription.subject, subscription.queue)
                self._flush_buffer(self._link)
                await self.flush()
                if self._reconnected_cb is not None:
                    await self._reconnected_cb()
                return
            except (OSError, nats.errors.Error) as error:
                self._close_link()
                await self._error_cb(error)
                if self._status != Client.CLOSED:
                    self._status = Client.RECONNECTING
                await asyncio.sleep(self.options["reconnect_time_wait"])

    def _close_link(self) -> None:
        if self._ping_interval_task is not None and self._ping_interval_task is not asyncio.current_task():
            self._ping_interval_task.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self._check_alive()
        if not self.is_closed and self._link is not None:
            self._link.close()
            self._link = None
        await super()._close(status, do_cbs)

    async def force_reconnect(self) -> None:
        self._check_alive()
        await super().force_reconnect()

    async def drain(self) -> None:
        self._check_alive()
        await super().drain()

    @property
    def connected_server_version(self) -> ServerVersion:
        return ServerVersion(SERVER_VERSION)

    def jetstream(self, **options: Any) -> MemoryJetStream:
        return MemoryJetStream(self, **options)

    # Sending

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        if reply and not reply.startswith(self._response_prefix or "\0"):
            self._check_alive()
            _validate_subject(reply)
        self._send(subject, payload, reply, headers)

    def _send(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
        message = self._message(subject, payload, reply, headers)
        self._count(message)
        if self._link is not None:
            self._link.publish(message)
        else:
            self._buffer.append(message)
            self._pending_data_size += len(payload) + len(subject) + len(reply)

    def _append(
        self, subject: str, payload: bytes, headers: dict[str, str] | None
    ) -> tuple[str, Appended] | None:
        link, process = self._link, self.process
        if link is None:
            return None
        message = self._message(subject, payload, "", headers)
        found = append(self._broker, link, message)
        if found is not None:
            self._count(message)
            if process is not None and not process.alive:
                process.check_alive()
        return found

    def _count(self, message: Message) -> None:
        stats = self.stats
        stats["out_msgs"] += 1
        stats["out_bytes"] += len(message.data)

    def _message(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> Message:
        """Return a message that may be sent now. Raises nats-py's errors."""
        process = self.process
        if process is not None and not process.alive:
            process.check_alive()
        if subject not in self._known_subjects:
            self._check_subject(subject)
        size = len(payload)
        if self._status != Client.CONNECTED:
            if self.is_closed:
                raise nats.errors.ConnectionClosedError
            if self.is_draining_pubs:
                raise nats.errors.ConnectionDrainingError
            if not self.is_connected and size + self._pending_data_size > self._max_pending_size:
                raise nats.errors.OutboundBufferLimitError
        if size > self._max_payload:
            raise nats.errors.MaxPayloadError
        return Message(subject, bytes(payload), reply, as_received(headers) if headers else None)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        if old_style:
            return await super().request(subject, payload, timeout, old_style, headers)
        if subject not in self._known_subjects:
            self._check_subject(subject)
        answer = await self._request_new_style(subject, payload, timeout, headers)
        if answer.headers and answer.headers.get(Header.STATUS) == NO_RESPONDERS_STATUS:
            raise nats.errors.NoRespondersError
        return answer

    def _check_subject(self, subject: str) -> None:
        """Check a subject once, as nats-py does."""
        _validate_subject(subject)
        if len(self._known_subjects) < KNOWN_SUBJECTS:
            self._known_subjects.add(subject)

    def _flush_buffer(self, link: Link) -> None:
        for message in self._buffer:
            link.publish(message)
        self._buffer.clear()
        self._pending_data_size = 0

    async def _flush_pending(self, force_flush: bool = False) -> None:
        """Do nothing: messages are on the link as soon as they are sent."""

    async def subscribe(self, subject: str, *args: Any, **options: Any) -> Subscription:
        self._check_alive()
        return await super().subscribe(subject, *args, **options)

    async def _send_subscribe(self, sub: Subscription) -> None:
        if sub._cb is not None and self._broker.network.at_once:
            sub._pending_queue = HandlerQueue(sub, self._error_cb)
        else:
            sub._pending_queue = MessageQueue(sub._pending_queue.maxsize)
        if self._link is not None:
            self._link.subscribe(sub._id, sub.subject, sub.queue)

    async def _send_unsubscribe(self, sid: int, limit: int = 0) -> None:
        self._check_alive()
        if self._link is not None:
            self._link.unsubscribe(sid, limit)

    async def flush(self, timeout: float = 10) -> None:
        """Wait until the broker has received everything sent.

        Returns at once without a connection, as nats-py's.
        """
        self._check_alive()
        if timeout <= 0:
            raise nats.errors.BadTimeoutError
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if self._link is None:
            return
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._send_ping(future)
        try:
            await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise nats.errors.FlushTimeoutError from None

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        self._check_alive()
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        if self._link is not None:
            self._link.ping()

    async def _ping_interval(self) -> None:
        while True:
            await asyncio.sleep(self.options["ping_interval"])
            if not self.is_connected:
                continue
            self._pings_outstanding += 1
            if self._pings_outstanding > self.options["max_outstanding_pings"]:
                await self._process_op_err(StaleConnectionError())
                return
            await self._send_ping()

    def _check_alive(self) -> None:
        if self.process is not None:
            self.process.check_alive()

    def loop_time(self) -> float:
        """Return the time of the loop that the broker runs on, in seconds."""
        return self._broker.loop.time()

    # Receiving

    def on_message(self, delivery: tuple[Link, int, Message]) -> None:
        self.take(*delivery)

    def on_pong(self, link: Link) -> None:
        if link is not self._link or not self._pongs:
            return
        future = self._pongs.pop(0)
        if not future.done():
            future.set_result(True)
        self._pings_outstanding = 0

    def on_end(self, link: Link) -> None:
        """Handle the end of the connection by the broker."""
        if link is self._link:
            self.start_task(self._ended())

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        context = copy_context()
        context.run(enter, self.process)
        asyncio.get_running_loop().create_task(work, context=context)

    async def _ended(self) -> None:
        error = UnexpectedEOF()
        await self._error_cb(error)
        await self._process_op_err(error)
