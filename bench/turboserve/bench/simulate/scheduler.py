"""The scheduler: the real core and the real executor, fed by the simulated bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turboserve import subjects
from turboserve.bench.simulate.kernel import Program, sleep
from turboserve.bench.simulate.log import Stream
from turboserve.bench.simulate.network import Network
from turboserve.contracts.events import WorkerJoined, WorkerLeft
from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.requests import ListSessions, ListWorkers, SessionPage, WorkerPage
from turboserve.contracts.workers import LoadReport
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.executor import Executor
from turboserve.scheduler.messages import (
    AllListed,
    Command,
    Event,
    ListAll,
    LoadReported,
    SessionChanged,
    Tick,
    Watched,
    WorkerChanged,
)
from turboserve.subjects import Endpoint, Topic

TICK_S = 0.25
POLL_S = 0.25


class VirtualBus:
    """As much of `turboserve.bus.Bus` as an executor uses."""

    def __init__(self, network: Network, program: Program) -> None:
        self._network, self._program = network, program
        self.on_feedback: Callable[[LoadFeedback], None] = lambda _feedback: None

    async def call(
        self, endpoint: Endpoint[Any, Any], request: Any, *, deadline_s: float | None = None
    ) -> Any:
        limit_s = 2.0 if deadline_s is None else deadline_s
        answer = await self._network.call(
            self._program, endpoint.server, endpoint.subject, request, limit_s
        )
        if isinstance(request, ListSessions):
            return SessionPage.model_construct(sessions=answer, next=None)
        if isinstance(request, ListWorkers):
            return WorkerPage.model_construct(workers=answer)
        return answer

    async def publish(self, topic: Topic[Any], token: str, message: Any, data: bytes = b"") -> None:
        if topic is subjects.FEEDBACK:
            self.on_feedback(message)


class KernelClock:
    """The kernel's time as a service's clock."""

    def __init__(self, program: Program) -> None:
        self._kernel = program.kernel

    def monotonic(self) -> float:
        return self._kernel.now

    def wall(self) -> float:
        return self._kernel.now


class SchedulerProcess:
    """The scheduler's shell in small: one core per life, events from a durable consumer, commands abreast."""

    def __init__(
        self, program: Program, network: Network, events: Stream, make_core: Callable[[], Scheduler]
    ) -> None:
        self.program, self.network = program, network
        self.core = make_core()
        self.bus = VirtualBus(network, program)
        self.on_command: Callable[[Command], None] = lambda _command: None
        self._events, self._make_core = events, make_core
        self._executor = Executor(self.bus, KernelClock(program))  # type: ignore[arg-type]
        self._acknowledged = 0
        """The durable consumer's position: the broker's, so it survives this process."""
        self._listed_up_to = 0

    def boot(self) -> None:
        self.core = self._make_core()
        self._listed_up_to = 0
        self.program.spawn(self._consume())
        self.program.every(TICK_S, lambda: self.feed(Tick(connected=self.network.reaches(self.program))))
        self.feed(Tick(connected=self.network.reaches(self.program)))

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.program.kernel.now):
            self.on_command(command)
            self.program.spawn(self._execute(command))

    # Hints

    def load(self, report: LoadReport) -> None:
        self.feed(LoadReported(report))

    def playhead(self, session: str, viewers: int) -> None:
        self.feed(Watched(session, viewers))

    # Commands and events

    async def _execute(self, command: Command) -> None:
        mark = len(self._events.entries) if isinstance(command, ListAll) else 0
        answer = await self._executor.run(command)
        if answer is not None:
            self.feed(answer)
        if isinstance(answer, AllListed):
            self._listed_up_to = mark

    async def _consume(self) -> None:
        """`bus.consume`: one at a time, in order, at least once."""
        kernel = self.program.kernel
        while True:
            there = self.network.reaches(self.program) and self._acknowledged < len(self._events.entries)
            if not there or not self.core.synced:
                await sleep(POLL_S)
                continue
            entry = self._events.entries[self._acknowledged]
            await sleep(kernel.random.expovariate(1.0 / self.network.faults.lag_s))
            if entry.sequence > self._listed_up_to:
                self._take(entry.body)
            if not kernel.chance(self.network.faults.lost_answer):
                self._acknowledged = entry.sequence

    def _take(self, event: Any) -> None:
        if isinstance(event, WorkerJoined | WorkerLeft):
            self.feed(WorkerChanged(event.worker))
        else:
            self.feed(SessionChanged(event.record))
