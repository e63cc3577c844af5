"""Steps the engine on a virtual loop, with timers where production has threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from turboserve import logs
from turboserve.simulation.runtime.device.blocking import BlockingCalls
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.packager import VirtualPackager
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.gather import GATHER_POLICIES
from turboserve.worker.engine.interface import Event
from turboserve.worker.service import commands
from turboserve.worker.service.class_drivers import ClassDrivers
from turboserve.worker.service.engine_commands import EngineCall, EngineCommand
from turboserve.worker.service.engine_driver import IDLE_S, EngineDriver

JUST_AFTER_S = 1e-4

log = logs.get("engine")
T = TypeVar("T")
NO_ENGINES: Mapping[str, Engine] = {}


class VirtualEngineRunner:
    """See `ports.EngineRunner`."""

    def __init__(
        self,
        engine: Engine,
        packager: VirtualPackager,
        loop: asyncio.AbstractEventLoop,
        clock: DeviceClock,
        faults: DeviceFaults,
        quiet_s: float,
        patience_s: float,
        tier_report_s: float,
        blocking: BlockingCalls | None = None,
        classes: Mapping[str, Engine] = NO_ENGINES,
    ) -> None:
        """Create a runner.

        Args:
            clock: The engine's.
            quiet_s: See `EngineDriver`, as are the next two.
            blocking: Runs the turns of an engine that waits for other workers in the middle of a step.
            classes: Engines by class, the first of which is `engine`, where the worker serves several.
        """
        self.engine, self.blocking = engine, blocking
        # During a step, the end of a job has no effect. So the runner itself waits for it while it rests.
        clock.ends = []
        intervals_s = quiet_s, patience_s, tier_report_s
        self._whole_rounds = bool(classes) or bool(engine.options.host_sessions)
        """Whether one session's playhead may let another one compute, or leave its slab."""
        self._driver: EngineDriver | ClassDrivers
        if classes:
            policy = GATHER_POLICIES.make(engine.options.policy)
            self._driver = ClassDrivers(classes, packager.put, clock, policy, intervals_s)
        else:
            self._driver = EngineDriver(engine, packager.put, clock, *intervals_s)
        self._packager, self._loop, self._clock, self._faults = packager, loop, clock, faults
        self._commands: deque[EngineCommand] = deque()
        self._next: asyncio.Handle | None = None
        """The next turn; None while a step is under way."""
        self._rested_until = 0.0
        """Time of the next turn while the runner waits for it."""
        self._stopping = False
        self._ended = asyncio.Event()
        self.turns = 0
        self.failure: BaseException | None = None
        self.device_error_sessions: tuple[str, ...] = ()
        self.alive = False
        for one in classes.values() or (engine,):
            one.when_done(self._wake)

    @property
    def generating(self) -> bool:
        """Whether the lease permits a step now, by the engine's own view."""
        return self.alive and not self._stopping and self._loop.time() < self._driver.generate_until

    def start(self) -> None:
        """See `EngineRunner.start`."""
        self.alive = True
        self._next = self._loop.call_soon(self._turn)

    def submit(self, command: EngineCommand) -> None:
        """See `EngineRunner.submit`."""
        at_once = not (self._whole_rounds or self._commands)
        if at_once and isinstance(command, commands.SetPlayhead) and self._rests:
            self._move_playhead(command)
            return
        self._commands.append(command)
        self._wake()

    def call(self, function: Callable[[Engine], T], model: str = "") -> Future[T]:
        """See `EngineRunner.call`."""
        future: Future[T] = Future()
        self.submit(EngineCall(function, future, model))
        return future

    def adopt(self, session: str, run: int, adopt: Callable[[Engine], None], model: str = "") -> Future[None]:
        """See `EngineRunner.adopt`."""

        def adopted(engine: Engine) -> None:
            adopt(engine)
            self._driver.has_come(session, run)

        return self.call(adopted, model)

    async def end(self, timeout_s: float) -> None:
        """See `EngineRunner.end`."""
        self._stopping = True
        self._wake()
        if self.alive:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ended.wait()
            except TimeoutError:
                return

    def _wake(self) -> None:
        """Start a turn soon. If a step is under way, the turn follows the step."""
        next_turn = self._next
        if next_turn is not None and isinstance(next_turn, asyncio.TimerHandle):
            next_turn.cancel()
            self._rested_until = 0.0
            self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Run rounds of the engine's loop, up to one that takes time or has no work."""
        self._next, self._rested_until = None, 0.0
        if not self.alive:
            return
        now = self._loop.time()
        if now < self._faults.stalled_until:
            # The time is checked repeatedly, because the fault may be withdrawn.
            self._next = self._loop.call_at(min(now + IDLE_S, self._faults.stalled_until), self._turn)
            return
        self._clock.catch_up()
        if self.blocking is None:
            self._run_rounds()
        else:
            self.blocking.run(self._run_rounds)

    def _run_rounds(self) -> None:
        try:
            self._rounds()
        except Exception as error:
            self.alive, self.failure = False, error
            self.device_error_sessions = self._driver.device_error_sessions(error)
            log.warning("engine failed", error=repr(error))

    def _rounds(self) -> None:
        while True:
            self.turns += 1
            while self._commands:
                self._driver.carry_out(self._commands.popleft())
            # A command may have computed for another worker.
            now = self._loop.time()
            if self._stopping:
                self.alive = False
                self._ended.set()
                return
            if self._packager.room_at > now:
                self._next = self._loop.call_at(self._packager.room_at, self._turn)
                return
            events = self._driver.step()
            if self._clock.now > now:
                # The step is under way, and nothing interrupts it.
                self._loop.call_at(self._clock.now, self._stepped, events)
                return
            for event in events:
                self._driver.stamp(event)
            if self._commands:
                continue
            idle_s = self._driver.idle_s(rested=not events)
            if idle_s > 0:
                self._rest_until(now + idle_s)
                return

    @property
    def _rests(self) -> bool:
        """Whether the runner waits for a command or for the time at which a session is due."""
        return self._rested_until > self._loop.time() >= self._faults.stalled_until and self.alive

    def _rest_until(self, when: float) -> None:
        self._rested_until = when
        # Work that is due at a time is done just after it.
        at = min(when + JUST_AFTER_S, self._clock.next_end())
        self._next = self._loop.call_at(at, self._turn)

    def _move_playhead(self, command: commands.SetPlayhead) -> None:
        """Carry out a change of a playhead without a whole round.

        It is the most frequent command and concerns one session; a round would find no other work.
        """
        self._clock.catch_up()
        self.turns += 1
        self._driver.carry_out(command)
        now, engine = self._loop.time(), self.engine
        if not self._driver.generating:
            return
        if engine.has_work_for(command.session, now):
            self._wake()
            return
        due = engine.next_due(now, command.session)
        if due is not None and due < self._rested_until and self._next is not None:
            self._next.cancel()
            self._rest_until(due)

    def _stepped(self, events: list[Event]) -> None:
        self._clock.catch_up()
        for event in events:
            self._driver.stamp(event)
        self._turn()
