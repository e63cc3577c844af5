"""Two schedulers, one of which leads: the real cores and the real executor, fed by the simulated bus."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from turboserve import subjects
from turboserve.bench.simulate.kernel import Awaited, Program, sleep
from turboserve.bench.simulate.log import Stream
from turboserve.bench.simulate.network import Network
from turboserve.bench.simulate.virtual_bus import KernelClock, VirtualBus
from turboserve.contracts import leading
from turboserve.contracts.errors import StaleTermError, TurboServeError, UnavailableError
from turboserve.contracts.events import WorkerJoined, WorkerLeft
from turboserve.contracts.requests import MoveAccepted, MoveSession, SessionRef
from turboserve.contracts.workers import LoadReport
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.executor import Executor
from turboserve.scheduler.leadership import Ask, Keep, Leadership, Look, Run
from turboserve.scheduler.messages import (
    AllListed,
    Command,
    Event,
    ListAll,
    LoadReported,
    MoveAsked,
    Reply,
    SessionChanged,
    Tick,
    Watched,
    WorkerChanged,
)

NAME = "scheduler"
STEP_S = 0.1
TICK_S = 0.25
POLL_S = 0.25


class Term:
    """The scheduler at work in one term, as `scheduler.shell` does it: one core, commands abreast."""

    def __init__(self, process: SchedulerProcess, term: int, core: Scheduler) -> None:
        self.term, self.core = term, core
        self._process, self._program = process, process.program
        self._executor = Executor(
            VirtualBus(process.network, process.program),  # type: ignore[arg-type]
            KernelClock(process.program.kernel),
            term,
            process.deposed,
        )
        self._listed_up_to = 0
        self._position = 0
        self._numbers = itertools.count()
        self._waiting: dict[int, Awaited[Reply]] = {}
        self.over = False

    def start(self) -> None:
        self._program.spawn(self._ticks())
        self._program.spawn(self._read_events())
        self._process.network.serve(NAME, self._program, lambda _name: self.move)

    def leads(self) -> bool:
        return not self.over and self._process.leads_in(self.term)

    def feed(self, event: Event) -> None:
        if not self.leads():
            return
        for command in self.core.handle(event, self._program.kernel.now):
            if isinstance(command, Reply):
                waiting = self._waiting.pop(command.request, None)
                if waiting is not None:
                    waiting.settle(command)
                continue
            self._process.on_command(self, command)
            self._program.spawn(self._execute(command))

    async def move(self, request: MoveSession) -> MoveAccepted:
        """An operator's wish (`scheduler.desk`)."""
        bus = VirtualBus(self._process.network, self._program)
        record = await bus.call(subjects.GET_SESSION, SessionRef(session=request.session))
        if not self.leads():
            raise UnavailableError("the scheduler is changing hands", retry_after_s=1.0)
        number = next(self._numbers)
        answer = self._waiting[number] = Awaited()
        self.feed(SessionChanged(record))
        self.feed(MoveAsked(number, request.session, request.worker))
        reply = await answer
        if reply.error is not None:
            raise reply.error
        assert reply.record is not None
        assert reply.decision is not None
        return MoveAccepted(record=reply.record, decision=reply.decision)

    async def _ticks(self) -> None:
        while not self.over:
            self.feed(Tick(connected=self._process.network.reaches(self._program)))
            await sleep(TICK_S)

    async def _execute(self, command: Command) -> None:
        if not self.leads():
            return
        mark = len(self._process.events.entries) if isinstance(command, ListAll) else 0
        answer = await self._executor.run(command)
        if answer is not None:
            self.feed(answer)
        if isinstance(answer, AllListed):
            self._listed_up_to = mark

    async def _read_events(self) -> None:
        """What has been committed since the first listing; later listings make up for what this misses."""
        kernel, network, events = self._program.kernel, self._process.network, self._process.events
        while not self.core.synced:
            await sleep(POLL_S)
        self._position = self._listed_up_to
        while not self.over:
            if not network.reaches(self._program) or self._position >= len(events.entries):
                await sleep(POLL_S)
                continue
            entry = events.entries[self._position]
            await sleep(kernel.random.expovariate(1.0 / network.faults.lag_s))
            # An interrupted reader begins again at its position: some entries come twice.
            if not kernel.chance(network.faults.doubled_hint):
                self._position = entry.sequence
            if entry.sequence > self._listed_up_to:
                self._take(entry.body)

    def _take(self, event: Any) -> None:
        if isinstance(event, WorkerJoined | WorkerLeft):
            self.feed(WorkerChanged(event.worker))
        else:
            self.feed(SessionChanged(event.record))


class SchedulerProcess:
    """One of several processes (`scheduler.lead`): asks for the lead, and works while it has it."""

    def __init__(
        self, program: Program, network: Network, events: Stream, make_core: Callable[[], Scheduler]
    ) -> None:
        self.program, self.network, self.events = program, network, events
        self.leadership = Leadership(program.name)
        self.at_work: Term | None = None
        self.on_command: Callable[[Term, Command], None] = lambda _term, _command: None
        self._make_core = make_core
        self._bus = VirtualBus(network, program)

    def boot(self) -> None:
        self.leadership, self.at_work = Leadership(f"{self.program.name}-{self.program.life}"), None
        self.program.spawn(self._run())

    @property
    def _now(self) -> float:
        return self.program.kernel.now

    def leads_in(self, term: int) -> bool:
        return self.leadership.term == term and self.leadership.leads(self._now)

    def deposed(self) -> None:
        self.leadership.deposed(self._now)

    # Hints

    def load(self, report: LoadReport) -> None:
        if self.at_work is not None:
            self.at_work.feed(LoadReported(report))

    def playhead(self, session: str, viewers: int) -> None:
        if self.at_work is not None:
            self.at_work.feed(Watched(session, viewers))

    # The lead

    async def _run(self) -> None:
        while True:
            ask = self.leadership.tick(self._now)
            if ask is not None:
                await self._ask(ask)
            self._follow()
            await sleep(STEP_S)

    async def _ask(self, ask: Ask) -> None:
        leadership, call = self.leadership, self._bus.call
        deadline_s = leadership.lease.lease_s / 2
        try:
            match ask:
                case Look():
                    row = await call(subjects.GET_LEADER, leading.GetLeader(name=NAME), deadline_s=deadline_s)
                    leadership.answered(row, self._now)
                case Run(term, beat):
                    campaign = leading.Campaign(name=NAME, holder=leadership.me, term=term, beat=beat)
                    result = await call(subjects.CAMPAIGN, campaign, deadline_s=deadline_s)
                    leadership.answered(result.record, self._now, granted=result.granted)
                case Keep(term):
                    keep = leading.KeepLead(name=NAME, holder=leadership.me, term=term)
                    kept = await call(subjects.KEEP_LEAD, keep, deadline_s=deadline_s)
                    leadership.answered(kept, self._now)
        except StaleTermError:
            leadership.refused(self._now)
        except TurboServeError:
            leadership.failed(self._now)

    def _follow(self) -> None:
        term = self.leadership.term
        if self.at_work is not None and self.at_work.term != term:
            self.at_work.over = True
            self.at_work = None
        if self.at_work is None and term is not None:
            self.program.kernel.note(self.program.name, "leads in term", term)
            self.at_work = Term(self, term, self._make_core())
            self.at_work.start()
