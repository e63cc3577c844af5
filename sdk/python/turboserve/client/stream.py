"""A session's video and events over a WebSocket, across broken connections."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import tenacity
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import (
    ConnectionClosed,
    ConnectionClosedError,
    InvalidStatus,
    WebSocketException,
)

from turboserve.client.errors import (
    ChunkGoneError,
    GatewayUnreachableError,
    problem_error,
)
from turboserve.client.gateways import Gateways, SilenceWatch
from turboserve.client.models import Chunk, End, Event, Hello, Skip
from turboserve.client.stream_messages import (
    FINAL_CODES,
    Item,
    MessageReader,
    close_code,
    read_hello,
    without_skipped,
)
from turboserve.client.stream_socket import greeting, open_socket, refusal, send_reports

RECONNECT_WITHIN_S = 60.0
"""Time without a connection after which a stream gives up."""
_RECEIVED_ITEMS = 64
"""Largest number of items that are received before the caller takes them, so that a skip is noticed in time.
More stay with the gateway."""
_BACKOFF = tenacity.wait_random_exponential(multiplier=0.1, max=3.0)


class VideoStream:
    """Chunks of one session in order, without repetitions, and without gaps except those that it reports.

    After a prompt with `drop_buffer`, the stream discards what it has received and the caller has not taken.
    It continues with the first chunk that shows the prompt: see `Skip`.

    `async for chunk in stream` gives the chunks, and ends with the session. A worker generates only a few
    seconds ahead of the playhead. The playhead is at the chunk that the caller takes next, unless the caller
    sets `playhead_s`: so a caller that stops taking chunks stops the generation.
    """

    def __init__(
        self,
        gateways: Gateways,
        path: str,
        headers: dict[str, str],
        *,
        after: int | None = None,
        events_after: int | None = None,
        skip_lost: bool = False,
        keep_skipped: bool = False,
        reconnect_within_s: float = RECONNECT_WITHIN_S,
    ) -> None:
        """`path`: of the stream at each gateway. See `AsyncSession.watch` for the other arguments."""
        self.hello: Hello | None = None
        """State of the session at the newest connection. None before the first."""
        self.end: End | None = None
        """How the session ended. None: it has not."""
        self.playhead_s: float | None = None
        """Media time that the caller shows. None: the playhead follows the chunks that the caller takes."""
        self.keep_skipped = keep_skipped
        self.last_skip: Skip | None = None
        """Newest skip that was received. Frames before its `start_s` need not be shown any more."""
        self.connections = 0
        """Number of connections so far."""
        self._gateways, self._path, self._headers = gateways, path, headers
        self._gateway = gateways.current
        """Address of the newest connection, or of the attempt to get one."""
        self._silence = SilenceWatch()
        self._after, self._events_after = after, events_after
        self._skip_lost, self._reconnect_within_s = skip_lost, reconnect_within_s
        self._socket: ClientConnection | None = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        """They report the playhead, and receive."""
        self._received: deque[Item | Exception] = deque()
        """In the order in which they came. An exception is the last."""
        self._arrived, self._taken = asyncio.Event(), asyncio.Event()
        self._taken_s = self._received_s = 0.0
        self._problem: dict[str, Any] = {}
        """Why the gateway has refused the newest connection. Empty: it has not."""
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await self._disconnect()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        async for item in self.items():
            if isinstance(item, Chunk):
                yield item

    async def items(self) -> AsyncIterator[Chunk | Event | Skip]:
        """Chunks, events and skips, in the order in which they come.

        Raises ChunkGoneError if the log lost the next chunk (unless `skip_lost`), other ProblemErrors, and
        GatewayUnreachableError after `reconnect_within_s` without a connection.
        """
        while self.end is None:
            try:
                item = await self._next()
            except ConnectionClosed as closed:
                if self._closed:
                    return
                await self._reconnect(closed)
                continue
            if isinstance(item, End):
                self.end = item
            elif isinstance(item, Skip):
                self._taken_s = max(self._taken_s, item.start_s)
                yield item
            elif isinstance(item, Chunk):
                yield item
                self._taken_s = max(self._taken_s, item.end_s)
                self._after = item.index
            else:
                self._events_after = item.sequence
                yield item

    # Inside

    async def _next(self) -> Item:
        if self._socket is None:
            raise RuntimeError("use the stream in an `async with` block")
        while not self._received:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._received.popleft()
        self._taken.set()
        if isinstance(item, Exception):
            # It stays, for a caller that asks again.
            self._received.append(item)
            raise item
        return item

    async def _receive(self, socket: ClientConnection) -> None:
        """Put what comes into `_received`, until the connection ends."""
        messages = MessageReader()
        try:
            while True:
                while len(self._received) >= _RECEIVED_ITEMS:
                    self._taken.clear()
                    self._silence.heard()
                    self._silence.reads = False
                    await self._taken.wait()
                self._silence.reads = True
                item = messages.read(await socket.recv())
                self._silence.heard(video=isinstance(item, Chunk))
                self._problem = messages.problem
                if item is not None:
                    self._put(item)
        except asyncio.CancelledError:
            self._put(ConnectionClosedError(None, None))
            raise
        except Exception as error:
            self._put(error)

    def _put(self, item: Item | Exception) -> None:
        if isinstance(item, Chunk):
            self._received_s = item.end_s
        elif isinstance(item, Skip):
            item = self.last_skip = without_skipped(self._received, item, keep=self.keep_skipped)
        self._received.append(item)
        self._arrived.set()

    async def _reconnect(self, closed: ConnectionClosed) -> None:
        await self._disconnect()
        self._go_on_after(close_code(closed))
        self._gateways.leave(self._gateway)
        await self._connect()

    def _go_on_after(self, code: int) -> None:
        """Raise the problem behind a close code that a repeat would meet again."""
        status = FINAL_CODES.get(code)
        if status is None:
            return
        problem, self._problem = self._problem, {}
        error = problem_error(status, problem or {"title": f"the gateway closed the stream with {code}"})
        if isinstance(error, ChunkGoneError) and self._skip_lost:
            self._after = error.continues_at - 1
            return
        raise error

    async def _connect(self) -> None:
        """Connect with as many attempts as `reconnect_within_s` allows, and read the greeting."""
        self._problem = {}
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_before_delay(self._reconnect_within_s),
            wait=self._wait_s,
            retry=tenacity.retry_if_exception_type((OSError, TimeoutError, WebSocketException)),
            reraise=True,
        )
        try:
            await retrying(self._connect_once)
        except (OSError, TimeoutError, WebSocketException) as error:
            if self._problem:
                raise problem_error(self._problem.get("status", 503), self._problem) from error
            reason = f"{self._gateway}{self._path}: {error or type(error).__name__}"
            raise GatewayUnreachableError(reason) from error

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        if state.attempt_number < self._gateways.count:
            return 0.0
        return max(self._problem.get("retry_after_s") or 0.0, _BACKOFF(state))

    async def _connect_once(self) -> None:
        self._gateway = self._gateways.current
        try:
            async with asyncio.timeout(self._silence.limit_s if self._gateways.several else None):
                await self._open()
        except (OSError, TimeoutError, WebSocketException):
            self._silence.left()
            self._gateways.leave(self._gateway)
            raise

    async def _open(self) -> None:
        url = f"ws{self._gateway.removeprefix('http')}{self._path}"
        query = {"after": self._after, "events_after": self._events_after}
        given = urlencode({name: value for name, value in query.items() if value is not None})
        try:
            socket = await open_socket(f"{url}?{given}" if given else url, self._headers)
        except InvalidStatus as refused:
            status, problem = refusal(refused)
            if status >= 500 or problem.get("retry_after_s") is not None:
                self._problem = {"status": status, **problem} if problem else {}
                raise
            raise problem_error(status, problem) from None
        try:
            self._greeted(socket, await greeting(socket, self._note))
        except ConnectionClosed as closed:
            self._go_on_after(close_code(closed))
            raise
        except BaseException:
            await socket.close()
            raise

    def _note(self, problem: dict[str, Any]) -> None:
        self._problem = problem

    def _greeted(self, socket: ClientConnection, message: dict[str, Any]) -> None:
        hello = read_hello(message)
        if self.hello is None:
            self._taken_s = self._received_s = hello.start_s
        if self._events_after is None:
            self._events_after = hello.events_after
        self.hello, self._socket = hello, socket
        self._gateways.learn(hello.gateways)
        self._silence.heard()
        self._received.clear()
        self.connections += 1
        self._tasks = (
            asyncio.create_task(
                send_reports(
                    socket,
                    hello.report_interval_s,
                    self._position_s,
                    lambda: self._received_s,
                    self._silence if self._gateways.several else None,
                )
            ),
            asyncio.create_task(self._receive(socket)),
        )

    def _position_s(self) -> float:
        position_s = self._taken_s if self.playhead_s is None else self.playhead_s
        if self.last_skip is not None and not self.keep_skipped:
            position_s = max(position_s, self.last_skip.start_s)
        return position_s

    async def _disconnect(self) -> None:
        tasks, socket = self._tasks, self._socket
        self._tasks, self._socket = (), None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if socket is not None:
            await socket.close()
