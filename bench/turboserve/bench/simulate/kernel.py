"""Virtual time: one queue of events, programs that can be killed or frozen, and a trace that is compared."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Task = Coroutine[Any, Any, T]
"""What a program does step by step; it may await `sleep`, `Awaited` and others of its kind, nothing else."""
Action = Callable[[], None]


class Kernel:
    """Time, chance and the trace of one run. Everything random comes from one seed."""

    def __init__(self, seed: int, keep_lines: bool = False) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.events = 0
        """Events that have taken place."""
        self.lines: list[str] | None = [] if keep_lines else None
        self.crash_chance: Callable[[Program], bool] = lambda _program: False
        """Asked before every step of a program: whether it is killed now."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._queue: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    @property
    def digest(self) -> str:
        """Of everything noted so far."""
        return self._digest.hexdigest()

    def note(self, *what: object) -> None:
        """Write one line of the trace."""
        line = " ".join(map(str, what))
        self._digest.update(f"{self.now:.6f} {line}\n".encode())
        if self.lines is not None:
            self.lines.append(f"{self.now:9.3f}  {line}")

    def at(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action))

    def run(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            self.events += 1
            action()
        self.now = end

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.random.random() < probability


class _Sleep:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[float, None, None]:
        yield self._seconds


def sleep(seconds: float) -> _Sleep:
    """Let virtual time pass, in the program whose task awaits it."""
    return _Sleep(seconds)


class Awaited(Generic[T]):
    """An outcome that is settled once: a value or an error. Later outcomes are ignored."""

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._then: Callable[[T | None, Exception | None], None] | None = None

    def __await__(self) -> Generator[Awaited[T], T, T]:
        return (yield self)

    def settle(self, value: T | None = None, error: Exception | None = None) -> None:
        if self.done:
            return
        self.done, self._value, self._error = True, value, error
        if self._then is not None:
            self._then(value, error)

    def then(self, action: Callable[[T | None, Exception | None], None]) -> None:
        """Call `action(value, error)` once it is settled. For one listener."""
        if self.done:
            action(self._value, self._error)
        else:
            self._then = action


class Program:
    """One process: what it has under way dies with it, and waits while it is frozen.

    Whatever an event raises ends the process, as it would in production.
    """

    def __init__(self, kernel: Kernel, name: str, kind: str) -> None:
        self.kernel, self.name, self.kind = kernel, name, kind
        self.boot: Action = lambda: None
        """What it does at each start."""
        self.up = False
        self.life = 0
        self.frozen_until = 0.0
        self.on_death: Callable[[Program, str], None] = lambda _program, _why: None
        self.on_error: Callable[[Program, Exception], None] = lambda _program, _error: None
        self._unstarted: set[Task[Any]] = set()

    @property
    def frozen(self) -> bool:
        return self.kernel.now < self.frozen_until

    def start(self) -> None:
        if self.up:
            return
        self.up, self.frozen_until = True, 0.0
        self.life += 1
        self.kernel.note("start", self.name)
        self.boot()

    def kill(self, why: str) -> None:
        if not self.up:
            return
        self.up = False
        self.life += 1
        self.kernel.note("kill", self.name, why)
        self.discard()
        self.on_death(self, why)

    def discard(self) -> None:
        """Let go of tasks that have not begun; Python complains of those that merely vanish."""
        for task in self._unstarted:
            task.close()
        self._unstarted.clear()

    def freeze(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT after `seconds`."""
        self.frozen_until = max(self.frozen_until, self.kernel.now + seconds)
        self.kernel.note("freeze", self.name, f"{seconds:.3f}")

    def after(self, delay_s: float, action: Action) -> None:
        """Do it later, in this life."""
        if not self.up:
            # It was killed a moment ago, in the middle of this very step.
            return
        life = self.life

        def fire() -> None:
            if self.life != life:
                return
            if self.kernel.now < self.frozen_until:
                self.kernel.at(self.frozen_until - self.kernel.now, fire)
            elif self.kernel.crash_chance(self):
                self.kill("crash")
            else:
                self._do(action)

        self.kernel.at(delay_s, fire)

    def every(self, seconds: float, action: Action) -> None:
        """Do it again and again, in this life."""

        def fire() -> None:
            self.after(seconds, fire)
            action()

        self.after(seconds, fire)

    def spawn(self, task: Task[T]) -> Awaited[T]:
        """Run a task to its end, in this life."""
        result: Awaited[T] = Awaited()
        if not self.up:
            task.close()
            return result
        self._unstarted.add(task)
        self.after(0.0, lambda: self._begin(task, result))
        return result

    def _begin(self, task: Task[T], result: Awaited[T]) -> None:
        self._unstarted.discard(task)
        self._step(task, result, None, None)

    def _step(self, task: Task[T], result: Awaited[T], value: Any, error: Exception | None) -> None:
        try:
            wish = task.send(value) if error is None else task.throw(error)
        except StopIteration as stop:
            result.settle(stop.value)
            return
        except Exception as failure:
            if result._then is None and not result.done:
                result.settle(error=failure)
                raise
            result.settle(error=failure)
            return
        if isinstance(wish, Awaited):
            life = self.life

            def resume(outcome: Any, trouble: Exception | None) -> None:
                if self.life == life:
                    self.after(0.0, lambda: self._step(task, result, outcome, trouble))

            wish.then(resume)
        else:
            self.after(wish, lambda: self._step(task, result, None, None))

    def _do(self, action: Action) -> None:
        try:
            action()
        except Exception as error:
            self.on_error(self, error)
            self.kill(f"error: {error!r}")
