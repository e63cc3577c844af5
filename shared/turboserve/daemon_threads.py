"""Calls on threads that do not keep the process from ending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Runs each call on a daemon thread of its own.

    When a process ends, the interpreter joins the threads of a `ThreadPoolExecutor`, and `asyncio.run` joins
    those of the loop's executor. A call that hangs would keep the process alive there.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the threads."""
        self._name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        Thread(target=run, name=self._name, daemon=True).start()
        return future
