"""The autoscaler: the real pool's core, a provider that starts workers in the simulation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from turboserve import subjects
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.default import default_table
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import (
    Command,
    DeclareGone,
    Done,
    Drain,
    Event,
    Exited,
    Failed,
    Launch,
    Listed,
    ListMembers,
    ListWorkers,
    Living,
    LoadReported,
    Release,
    Reserve,
    SizeWanted,
    Tick,
    WorkersListed,
)
from turboserve.bench.simulate.kernel import Awaited, Kernel, Program, sleep
from turboserve.bench.simulate.network import Network
from turboserve.bench.simulate.worker import MODEL
from turboserve.contracts import requests
from turboserve.contracts.errors import NotFoundError, TurboServeError, WorkerGoneError
from turboserve.contracts.events import SessionEvent
from turboserve.contracts.pool import LoadFeedback, PoolReport
from turboserve.contracts.workers import LoadReport

TICK_S = 0.5
CONTROL_S = 1.0
GRACE_S = 3.0


@dataclass
class Member:
    """A worker's process as the provider knows it."""

    slot: str
    program: Program
    stop: Callable[[], object]
    """Ask it to end."""


class Provider:
    """Starts and ends processes; what it has started survives the autoscaler."""

    def __init__(self, kernel: Kernel, network: Network, start: Callable[[str, str], Member]) -> None:
        """`start(slot, worker)` makes a process; it may take long to say anything, or never do."""
        self.kernel, self.network = kernel, network
        self.members: dict[str, Member] = {}
        self._start = start

    async def launch(self, slot: str, worker: str) -> None:
        await self._work()
        if any(member.slot == slot and member.program.up for member in self.members.values()):
            raise WorkerGoneError(f"{slot} is occupied")
        self.members[worker] = self._start(slot, worker)

    async def release(self, worker: str | None) -> None:
        await self._work()
        member = self.members.get(worker or "")
        if member is None or not member.program.up:
            return
        member.stop()
        waited_s = 0.0
        while member.program.up and waited_s < GRACE_S:
            await sleep(0.1)
            waited_s += 0.1
        member.program.kill("released")

    async def adopt(self) -> tuple[Living, ...]:
        await self._work()
        return tuple(
            Living(member.slot, worker, 1) for worker, member in self.members.items() if member.program.up
        )

    async def reserve(self) -> None:
        await self._work()

    async def _work(self) -> None:
        await sleep(self.network.delay())
        if self.kernel.chance(self.network.faults.provider_fails):
            raise TurboServeError("the provider has the hiccups")


class AutoscalerProcess:
    """The autoscaler's shell in small: one pool core and one control loop per life."""

    def __init__(
        self,
        program: Program,
        network: Network,
        provider: Provider,
        make_core: Callable[[], Pool],
        policy: ControlPolicy,
        size: int,
    ) -> None:
        """`size`: workers where none are there yet."""
        self.program, self.network, self.provider = program, network, provider
        self.policy, self._size = policy, size
        self.core = make_core()
        self.control: ControlLoop | None = None
        self.heard_at: float | None = None
        """When the scheduler was last heard in this life."""
        self.on_command: Callable[[Command], None] = lambda _command: None
        self.on_resize: Callable[[int, str], None] = lambda _size, _reason: None
        self._make_core = make_core
        self._table = default_table()

    def boot(self) -> None:
        self.core, self.control, self.heard_at = self._make_core(), None, None
        self.program.spawn(self._begin())

    async def _begin(self) -> None:
        """As many as are there: a restart under load must not shrink the pool. Else as configured."""
        while True:
            try:
                found = len(await self.provider.adopt())
                break
            except TurboServeError:
                await sleep(1.0)
        size = min(max(found or self._size, self.policy.least), self.policy.most)
        controller = Controller(self.policy, self._table, size)
        self.control = ControlLoop(controller, MODEL, self._table, None, self._resize)
        self.feed(SizeWanted(size, "found or configured"))
        self.program.every(TICK_S, lambda: self.feed(Tick()))
        self.program.every(CONTROL_S, self._control_tick)
        self.program.spawn(self._report_for_ever(self.control))

    def _resize(self, size: int, reason: str) -> None:
        self.on_resize(size, reason)
        self.feed(SizeWanted(size, reason))

    def _control_tick(self) -> None:
        if self.control is not None:
            self.control.tick(self.core.slots.values(), self.program.kernel.now)

    async def _report_for_ever(self, control: ControlLoop) -> None:
        while True:
            report = PoolReport(pool=self.core.name, model=MODEL, maximum=control.maximum)
            with suppress(TurboServeError):
                orders = await self._call(subjects.REPORT_POOL.subject, report)
                control.ordered(orders, self.program.kernel.now)
            await sleep(CONTROL_S)

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.program.kernel.now):
            self.on_command(command)
            self.program.spawn(self._execute(command))

    # Hints

    def load(self, report: LoadReport) -> None:
        if self.control is not None:
            self.feed(LoadReported(report))

    def feedback(self, feedback: LoadFeedback) -> None:
        """The scheduler's word about the load."""
        if self.control is not None:
            self.heard_at = self.program.kernel.now
            self.control.heard(feedback, self.program.kernel.now)

    def happened(self, event: SessionEvent) -> None:
        """An event of some session."""
        if self.control is not None:
            self.control.happened(event.to_bytes(), self.program.kernel.now)

    def exited(self, worker: str, status: str) -> None:
        if self.control is not None:
            self.feed(Exited(worker, status))

    # Commands

    async def _execute(self, command: Command) -> None:
        try:
            answer = await self._run(command)
        except (NotFoundError, WorkerGoneError) as error:
            answer = Failed(command.ticket, error.detail, missing=True)
        except TurboServeError as error:
            answer = Failed(command.ticket, error.detail)
        self.feed(answer)

    async def _run(self, command: Command) -> Event:
        match command:
            case Reserve():
                await self.provider.reserve()
            case Launch(slot=slot, worker=worker):
                await self.provider.launch(slot, worker)
            case Release(worker=worker):
                await self.provider.release(worker)
            case ListMembers(ticket):
                return Listed(ticket, await self.provider.adopt())
            case Drain(worker=worker):
                await self._call(subjects.DRAIN_WORKER.subject, requests.DrainWorker(worker=worker))
            case DeclareGone(worker=worker, reason=reason):
                notice = requests.WorkerGone(worker=worker, reason=reason)
                await self._call(subjects.WORKER_GONE.subject, notice)
            case ListWorkers(ticket):
                listed = await self._call(subjects.LIST_WORKERS.subject, requests.ListWorkers())
                return WorkersListed(ticket, listed)
        return Done(command.ticket, 1)

    def _call(self, name: str, request: object) -> Awaited[Any]:
        return self.network.call(self.program, "state-store", name, request)
