"""A service's processes, their clocks and their randomness. Each runs the service's own code."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from random import Random
from typing import Any, Protocol, TypeVar

from turboserve import ids
from turboserve.bus import Bus
from turboserve.config import Settings
from turboserve.contracts.errors import UnavailableError
from turboserve.service import Runtime, run_service
from turboserve.simulation.runtime.device.faults import is_device_error
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.process import Process
from turboserve.simulation.trace import EventTrace

T = TypeVar("T")


EPOCH_S = 1_700_000_000.0
"""Wall-clock time at which every run begins, on a host whose clock is right."""


class HostClock:
    """The clock of one host: monotonic time is the loop's, wall-clock time may be off."""

    def __init__(self, loop: VirtualLoop, skew_s: float = 0.0) -> None:
        self._loop, self.skew_s = loop, skew_s
        self.monotonic: Callable[[], float] = loop.time
        """Returns seconds. Nothing else is called so often, so it is the loop's own method."""

    def wall(self) -> float:
        return EPOCH_S + self._loop.time() + self.skew_s


class SeededRandomness:
    """A process's source of ids and tokens, determined by a seed."""

    def __init__(self, clock: HostClock, seed: int) -> None:
        self._clock, self._random = clock, random.Random(seed)

    def milliseconds(self) -> int:
        return int(self._clock.wall() * 1000)

    def randbits(self, bits: int) -> int:
        return self._random.getrandbits(bits)


class ConnectionLostError(Exception):
    """The process that was to answer has ended."""


class ServiceHost(Protocol):
    """The deployment as its processes use it."""

    loop: VirtualLoop
    trace: EventTrace
    random: Random

    async def connect(self, service: ServiceProcess) -> Bus:
        """Connect the service's bus. Runs in the service's process."""

    def ended(self, service: ServiceProcess, why: str) -> None:
        """Handle the end of a process."""

    def fail(self, invariant: str, message: str) -> None:
        """Report a violation."""


class ServiceProcess:
    """One process of a service, from its start to its end."""

    def __init__(
        self,
        host: ServiceHost,
        name: str,
        kind: str,
        settings: Settings,
        start: Callable[[ServiceProcess, Runtime], Awaitable[None]],
        skew_s: float = 0.0,
        life: int = 1,
    ) -> None:
        """Create the process; `begin` starts it.

        Each method may be called at any time: the process runs until it ends by itself or is killed.

        Args:
            kind: The service's name, by which it connects to the broker.
            start: As `service.run` takes it.
            life: The number of this process among those of its name.
        """
        self.host, self.name, self.kind, self.settings = host, name, kind, settings
        self.process = Process(f"{name}#{life}")
        self.clock = HostClock(host.loop, skew_s)
        self.runtime: Runtime | None = None
        """None until the process is connected."""
        self._start = start
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._seed = host.random.getrandbits(64)
        self._context: Context | None = None
        """With the process's source of ids. None until the process has begun."""

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def frozen(self) -> bool:
        return self.process.frozen_until > self.host.loop.time()

    def begin(self) -> None:
        self.host.trace.note("start", self.name)
        self.host.loop.spawn(self.process, self._live(), "main")

    def stop(self) -> None:
        """Stop the process as with SIGTERM."""
        if self.runtime is None:
            self.kill("terminated while it connected")
        elif self.alive:
            self.runtime.stopping.set()

    def kill(self, why: str) -> None:
        """End the process, as with SIGKILL or by its own exit."""
        if not self.alive:
            return
        self.host.trace.note("end", self.name, why)
        self.host.loop.kill(self.process)
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(ConnectionLostError(self.name))
        self.host.ended(self, why)

    def freeze(self, seconds: float) -> None:
        self.host.trace.note("freeze", self.name, f"{seconds:.3f}")
        self.host.loop.freeze(self.process, seconds)

    def submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` in the process. Returns its outcome; ConnectionLostError if the process ends first."""
        answer: asyncio.Future[T] = self.host.loop.create_future()
        context = copy_context() if self._context is None else self._context
        task = context.run(self.host.loop.spawn, self.process, work)
        self._waiting[answer] = None

        def done(task: asyncio.Task[T]) -> None:
            self._waiting.pop(answer, None)
            if answer.done():
                if not task.cancelled():
                    task.exception()
            elif task.cancelled():
                answer.set_exception(ConnectionLostError(self.name))
            elif (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        task.add_done_callback(done)
        return answer

    async def _live(self) -> None:
        """Run what the process's `__main__` runs."""
        ids.use_source(SeededRandomness(self.clock, self._seed))
        self._context = copy_context()
        status = 1
        try:
            bus = await self.host.connect(self)
            runtime = self.runtime = Runtime(self.kind, self.settings, bus, self.clock)
            status = await run_service(runtime, self._started)
            if runtime._failed is not None:
                self._failed(runtime._failed)
        except Exception as error:
            self._failed(error)
        self.kill(f"exit {status}")

    async def _started(self, runtime: Runtime) -> None:
        await self._start(self, runtime)

    def _failed(self, error: BaseException) -> None:
        # A process without its broker, database or device ends and is started again. Any other error is a
        # violation. Errors of a killed process that is being unwound do not count.
        if self.alive and not (isinstance(error, UnavailableError) or is_device_error(error)):
            self.host.fail("no_core_fails", f"{self.name}: {error!r}")
