"""Messages for the handler of a subscription, without a task that waits for each of them."""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import copy_context
from types import coroutine
from typing import Any

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from turboserve.simulation.runtime.broker.receiver import MessageQueue

Work = Coroutine[Any, Any, None]


class HandlerQueue(MessageQueue):
    """The queue of a subscription with a handler, and what calls the handler in place of nats-py's task.

    Nearly all handlers end without having waited: to wake a task for each message would cost more than they
    do. A handler begins as if it ran in the subscription's task. One that waits continues in that task, and
    later messages wait for its end.
    """

    def __init__(self, subscription: Subscription, on_error: Callable[[Exception], Awaitable[None]]) -> None:
        """Take the messages of a subscription that nats-py has just started."""
        super().__init__(subscription._pending_queue.maxsize)
        self._subscription, self._on_error = subscription, on_error
        self._events = asyncio.get_running_loop()
        self._context = copy_context()
        self._runs = self._stopped = False
        self._begun: tuple[Work, object] | None = None
        """The handler that waits, and what it waits for, until the task continues it."""
        self._wakes: asyncio.Future[None] = self._events.create_future()
        """Wakes the task."""
        handling: Any = subscription._wait_for_msgs_task
        handling.cancel()
        # nats-py calls `done` and `cancel` of its task.
        subscription._wait_for_msgs_task = self  # type: ignore[assignment]
        self._task = self._events.create_task(self._serve())

    def put_nowait(self, item: Msg) -> None:
        queue: deque[Msg] = self._queue  # type: ignore[attr-defined]
        if 0 < self.maxsize <= len(queue):
            raise asyncio.QueueFull
        queue.append(item)
        self._unfinished_tasks += 1
        if not self._runs:
            self._runs = True
            self._events.call_soon(self._run, context=self._context)

    def done(self) -> bool:
        """Return whether no further message is handled."""
        return self._stopped

    def cancel(self) -> None:
        """Handle no further message."""
        self._stopped = True
        self._task.cancel()

    def _next(self) -> Work | None:
        """Begin to handle the next message. None: there is none, or none is to be handled."""
        queue: deque[Msg] = self._queue  # type: ignore[attr-defined]
        if self._stopped or not queue:
            return None
        message, subscription = queue.popleft(), self._subscription
        subscription._pending_size -= len(message.data)
        return subscription._cb(message)  # type: ignore[misc,return-value]

    def _handled(self) -> None:
        self.task_done()
        subscription = self._subscription
        if 0 < subscription._max_msgs <= subscription._received:
            self._stopped = True

    def _run(self) -> None:
        """Handle the messages, up to one whose handler waits."""
        queue: deque[Msg] = self._queue  # type: ignore[attr-defined]
        subscription = self._subscription
        _enter_task(self._events, self._task)
        try:
            while queue and not self._stopped:
                # As `_next`, whose call would cost as much.
                message = queue.popleft()
                subscription._pending_size -= len(message.data)
                work: Work = subscription._cb(message)  # type: ignore[misc,assignment]
                try:
                    self._begun = work, work.send(None)
                except StopIteration:
                    self._handled()
                    continue
                except Exception as error:
                    self._begun = self._fail(error), None
                if not self._wakes.done():
                    self._wakes.set_result(None)
                return
        finally:
            _leave_task(self._events, self._task)
        self._runs = False

    async def _serve(self) -> None:
        while not self._stopped:
            canceled: asyncio.CancelledError | None = None
            try:
                await self._wakes
            except asyncio.CancelledError as error:
                canceled = error
            self._wakes = self._events.create_future()
            if self._begun is None:
                return
            (work, waits_for), self._begun = self._begun, None
            await self._finish(_resumed(work, waits_for, canceled))
            # What came meanwhile.
            while (later := self._next()) is not None:
                await self._finish(later)
            self._runs = False

    async def _finish(self, work: Awaitable[None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            self._stopped = True
        except Exception as error:
            await self._on_error(error)
        finally:
            self._handled()

    async def _fail(self, error: Exception) -> None:
        await self._on_error(error)


@coroutine
def _resumed(
    work: Work, waits_for: object, canceled: asyncio.CancelledError | None
) -> Generator[object, Any, None]:
    """Continue a coroutine that was begun elsewhere and waits, unless that was `canceled` since."""
    try:
        if canceled is not None:
            waits_for = work.throw(canceled)
        while True:
            try:
                answer = yield waits_for
            except BaseException as error:
                waits_for = work.throw(error)
            else:
                waits_for = work.send(answer)
    except StopIteration:
        return
