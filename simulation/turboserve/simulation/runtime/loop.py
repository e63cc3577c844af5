"""An asyncio event loop on virtual time.

Unmodified service code (`asyncio.sleep`, `asyncio.timeout`, task groups, queues) runs on it. Each callback
belongs to the process in whose context it was scheduled. Callbacks of one process run in the order in which
they were scheduled, as on an event loop of its own. The seed draws which process runs next, except in a fixed
order (`VirtualLoop.fixed_order`). Time does not pass while any process has a callback to run; otherwise it
jumps to the next timer, so no run waits for real time.

There is no I/O and there are no threads. Calls that need them raise `RuntimeError`, except `run_in_executor`,
which calls its function on the loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar

from turboserve.simulation.runtime.handles import VirtualFuture, VirtualHandle, VirtualTask, VirtualTimer
from turboserve.simulation.runtime.process import (
    CURRENT,
    Process,
    ProcessDeadError,
    current,
    enter,
    unwind,
)
from turboserve.simulation.runtime.threads import TimedThread

T = TypeVar("T")


TASKS_KEPT = 32
"""Ended tasks are discarded above twice the number of tasks left by the last discard, plus this many."""


class DeadlockError(RuntimeError):
    """The awaited future can no longer be resolved: no callback is ready and no timer is set."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of one world.

    The same seed and the same code give the same run, callback by callback.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        # asyncio asks in the constructor of each future and task. `bool()` is False and makes no frame.
        self.get_debug = bool  # type: ignore[method-assign]
        self.random = random.Random(seed)
        """Source of every random choice, directly or through generators seeded from it."""
        self.world = Process("world")
        """Owner of everything outside the processes: the in-memory servers, the faults, the clients."""
        self.callbacks = 0
        """Number of callbacks that have run."""
        self.before_callback: Callable[[Process], None] | None = None
        """Called before each callback of a living process; faults may freeze or kill the process here."""
        self.fixed_order = False
        """Whether a process runs until it has no callback, and then the one that waits longest. The number of
        callbacks then determines nothing. The seed draws while there is a `before_callback`."""
        self._now = 0.0
        self._times: list[float] = []
        """The times of `_timers`, as a heap. Comparing numbers touches less memory than comparing timers."""
        self._timers: dict[float, list[VirtualTimer]] = {}
        """Timers by time, in the order in which they were set."""
        self._frozen: list[tuple[float, int, Process]] = []
        self._order = itertools.count()
        self._runnable: list[Process] = []
        self._running: Process | None = None
        self._doomed: list[Process] = []
        self._generators: dict[int, Process] = {}
        self._processes: dict[Process, None] = {self.world: None}

    # Time

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Run everything that happens within the next `seconds` of virtual time."""
        self.run_until_complete(asyncio.sleep(seconds))

    # Scheduling

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if context is None:
            context = copy_context()
        process = context.get(CURRENT) or self.world
        handle = VirtualHandle(callback, args, self, context, process)
        if process.alive:
            if not process.ready:
                self._runnable.append(process)
            process.ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        process = context.get(CURRENT) or self.world
        return self._set_timer(VirtualTimer(when, callback, args, self, context, process))

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if context is None:
            context = copy_context()
        process = context.get(CURRENT) or self.world
        return self._set_timer(VirtualTimer(self._now + delay, callback, args, self, context, process))

    def _set_timer(self, timer: VirtualTimer) -> VirtualTimer:
        if timer.process.alive:
            when: float = timer._when
            waiting = self._timers.get(when)
            if waiting is None:
                self._timers[when] = [timer]
                heapq.heappush(self._times, when)
            else:
                waiting.append(timer)
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call `func` on the loop, in its turn: there are no threads. On a `TimedThread`, it takes time."""
        future: asyncio.Future[T] = self.create_future()

        def over(result: T) -> None:
            if not future.cancelled():
                future.set_result(result)

        def call() -> None:
            if future.cancelled():
                return
            try:
                if isinstance(executor, TimedThread):
                    result, over_at = executor.run(partial(func, *args))
                    self.call_at(over_at, over, result)
                else:
                    future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(call)
        return future

    # Processes

    def spawn(
        self, process: Process, work: Coroutine[Any, Any, T], name: str | None = None
    ) -> asyncio.Task[T]:
        """Run `work` as a task of `process`. Raises `ProcessDeadError` if the process was killed."""
        if not process.alive:
            work.close()
            raise ProcessDeadError(process.name)
        context = copy_context()
        context.run(enter, process)
        return context.run(self.create_task, work, name=name)

    def freeze(self, process: Process, seconds: float) -> None:
        """Freeze as with SIGSTOP, and SIGCONT after `seconds`.

        Callbacks wait, timers fire late, time passes.
        """
        process.frozen_until = max(process.frozen_until, self._now + seconds)

    def kill(self, process: Process) -> None:
        """Kill as with `kill -9`: no code of the process runs after this call.

        The ports of the process must call `Process.check_alive`.
        """
        if not process.alive:
            return
        process.alive = False
        process.ready.clear()
        self._doomed.append(process)
        if self._running is None:
            self._discard_process()

    def close(self) -> None:
        """Kill every process and close the loop."""
        for process in list(self._processes):
            self.kill(process)
        self._processes.clear()
        super().close()

    # Inside

    def _run_once(self) -> None:
        """Run callbacks until the loop is stopped; when none is ready, jump to the time of the next timer."""
        if self.fixed_order and self.before_callback is None:
            self._run_in_order()
            return
        runnable, draw = self._runnable, self.random.random
        while not self._stopping:  # type: ignore[attr-defined]
            count = len(runnable)
            if not count:
                self._jump()
                continue
            # The seed draws a process.
            index = int(draw() * count) if count > 1 else 0
            process = runnable[index]
            alive = process.alive
            if not alive or process.frozen_until > self._now:
                self._set_aside(index)
                continue
            ready = process.ready
            handle = ready.popleft()
            if not ready:
                del runnable[index]
            if handle._cancelled:
                continue
            if self.before_callback is not None:
                self.before_callback(process)
                if not process.alive:
                    continue
                if process.frozen_until > self._now:
                    process.ready.appendleft(handle)
                    if process not in runnable:
                        runnable.append(process)
                    continue
            self.callbacks += 1
            self._running = process
            try:
                # The same as `Handle._run`, without its frame.
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._report(handle, error)
            finally:
                self._running = None
                if self._doomed:
                    self._discard_process()

    def _run_in_order(self) -> None:
        """As `_run_once`, without a draw. One process after the other touches less memory."""
        runnable = self._runnable
        while not self._stopping:  # type: ignore[attr-defined]
            if not runnable:
                self._jump()
                continue
            process = runnable[0]
            if not process.alive or process.frozen_until > self._now:
                self._set_aside(0)
                continue
            ready = process.ready
            self._running = process
            try:
                while ready and process.frozen_until <= self._now and not self._stopping:  # type: ignore[attr-defined]
                    # It stays first while it runs: what it schedules does not queue the process again.
                    handle = ready[0]
                    if not handle._cancelled:
                        self.callbacks += 1
                        handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
                    if ready:
                        ready.popleft()
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._report(handle, error)
                if ready:
                    ready.popleft()
            finally:
                self._running = None
                if not ready:
                    del runnable[0]
                if self._doomed:
                    self._discard_process()

    def _report(self, handle: asyncio.Handle, error: BaseException) -> None:
        self.call_exception_handler(
            {
                "message": f"Exception in callback {handle._callback!r}",  # type: ignore[attr-defined]
                "exception": error,
                "handle": handle,
            }
        )

    def _set_aside(self, index: int) -> None:
        """Remove a process from those that may run. A frozen one waits for the end of its freeze."""
        process = self._runnable.pop(index)
        if process.alive:
            heapq.heappush(self._frozen, (process.frozen_until, next(self._order), process))

    def _jump(self) -> None:
        if self._stopping:  # type: ignore[attr-defined]
            return
        times, timers, frozen = self._times, self._timers, self._frozen
        if not frozen:
            self._fire_next()
            return
        when = math.inf
        while times:
            first = times[0]
            for timer in timers[first]:
                if not timer._cancelled and timer.process.alive:
                    when = first
                    break
            else:
                del timers[heapq.heappop(times)]
                continue
            break
        if frozen and frozen[0][0] < when:
            when = frozen[0][0]
        if when == math.inf:
            raise DeadlockError(f"no event is left at {self._now:.6f} s")
        if when > self._now:
            self._now = when
        now = self._now
        while frozen and frozen[0][0] <= now:
            process = heapq.heappop(frozen)[2]
            if process.alive and process.ready:
                self._runnable.append(process)
        while times and times[0] <= now:
            for timer in timers.pop(heapq.heappop(times)):
                timer._scheduled = False
                process = timer.process
                if not timer._cancelled and process.alive:
                    if not process.ready:
                        self._runnable.append(process)
                    process.ready.append(timer)

    def _fire_next(self) -> None:
        """Jump to the next timer and fire all timers of its time. As `_jump`, while no process is frozen."""
        times, timers, pop = self._times, self._timers, heapq.heappop
        fired = False
        while times and not (fired and times[0] > self._now):
            when = pop(times)
            for timer in timers.pop(when):
                process = timer.process
                if timer._cancelled or not process.alive:
                    continue
                timer._scheduled = False
                if not fired:
                    fired = True
                    if when > self._now:
                        self._now = when
                if not process.ready:
                    self._runnable.append(process)
                process.ready.append(timer)
        if not fired:
            raise DeadlockError(f"no event is left at {self._now:.6f} s")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer leaves the queue when its time comes."""

    def _new_task(self, work: Coroutine[Any, Any, Any], context: Context) -> asyncio.Task[Any]:
        process = context.get(CURRENT) or self.world
        number = next(self._order)
        task = VirtualTask(number, work, self, context)
        if not process.alive:
            # The task was created while a killed process unwinds. It never runs.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            work.close()
            return task
        tasks = process.tasks
        tasks[number] = task, context
        if len(tasks) > process.tasks_limit:
            for ended in [each for each, (known, _) in tasks.items() if known.done()]:
                del tasks[ended]
            process.tasks_limit = 2 * len(tasks) + TASKS_KEPT
        if process not in self._processes:
            self._processes[process] = None
        return task

    def create_future(self) -> asyncio.Future[Any]:
        return VirtualFuture(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        self._check_closed()  # type: ignore[attr-defined]
        task = self._new_task(coro, copy_context() if context is None else context)
        if name is not None:
            task.set_name(name)
        return task

    def number(self) -> int:
        """Return the next number of the loop's sequence."""
        return next(self._order)

    def _discard_process(self) -> None:
        """Unwind the coroutines of killed processes, with their ports closed.

        Otherwise Python unwinds them when it collects them, and prints the exceptions that they raise then.
        """
        while self._doomed:
            process = self._doomed.pop()
            for task, context in process.tasks.values():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                context.run(unwind, task.get_coro(), process)
            process.tasks.clear()
            self._processes.pop(process, None)

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        self._generators[id(agen)] = current() or self.world

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Close a dropped async generator in its own process, if the process still lives."""
        process = self._generators.pop(id(agen), self.world)
        if process.alive and not self.is_closed():
            self.spawn(process, agen.aclose())

    # Not available on a virtual loop

    def _process_events(self, event_list: object) -> None:
        raise RuntimeError("a virtual loop has no I/O")

    def _write_to_self(self) -> None:
        """Do nothing: there are no threads to wake."""
