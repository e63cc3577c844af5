"""The thread that owns the device: it takes commands from a queue and steps the engine."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from turboserve import logs
from turboserve.clock import Clock
from turboserve.worker.engine.engine import Engine
from turboserve.worker.service.engine_driver import EngineCall, EngineCommand, EngineDriver
from turboserve.worker.service.packaged_chunks import FromEngine

log = logs.get("engine")
T = TypeVar("T")


class EngineThread:
    """See `ports.EngineRunner`. `deliver` is called on this thread, in order, and may block it."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[FromEngine], None],
        clock: Clock,
        quiet_s: float = 0.2,
        patience_s: float = 2.0,
    ) -> None:
        """`quiet_s`, `patience_s`: see `EngineDriver`."""
        self.engine = engine
        self._driver = EngineDriver(engine, deliver, clock.monotonic, quiet_s, patience_s)
        self._commands: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        self._stopping = False
        self.turns = 0
        self.failure: BaseException | None = None
        self.device_error_sessions: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        # The end of a stream executor's job wakes this thread at once, also when nothing else is due.
        engine.when_done(lambda: self._commands.put(None))

    def start(self) -> None:
        """See `EngineRunner.start`."""
        self._thread.start()

    def submit(self, command: EngineCommand) -> None:
        """See `EngineRunner.submit`."""
        self._commands.put(command)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """See `EngineRunner.call`."""
        future: Future[T] = Future()
        self._commands.put(EngineCall(function, future))
        return future

    def adopt(self, session: str, run: int, adopt: Callable[[Engine], None]) -> Future[None]:
        """See `EngineRunner.adopt`."""

        def adopted(engine: Engine) -> None:
            adopt(engine)
            self._driver.has_come(session, run)

        return self.call(adopted)

    async def end(self, timeout_s: float) -> None:
        """See `EngineRunner.end`."""
        await asyncio.to_thread(self.stop, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End after the current step, and wait for it at most `timeout_s`."""
        self._stopping = True
        self._commands.put(None)
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """See `EngineRunner.alive`."""
        return self._thread.is_alive()

    def _main(self) -> None:
        try:
            while not self._stopping:
                self.turns += 1
                self._take_commands()
                if not self._stopping:
                    for event in self._driver.step():
                        self._driver.stamp(event)
        except BaseException as error:
            self.failure = error
            self.device_error_sessions = self._driver.device_error_sessions(error)
            log.exception("engine thread failed")

    def _take_commands(self) -> None:
        """Carry out all queued commands. If the engine has nothing to do, wait for a command first."""
        wait_s = self._driver.idle_s()
        try:
            command = self._commands.get(timeout=wait_s) if wait_s > 0 else self._commands.get_nowait()
            while True:
                if command is not None:
                    self._driver.carry_out(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            pass
