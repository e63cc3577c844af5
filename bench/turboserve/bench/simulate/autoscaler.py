"""The autoscaler: the real pool's core, a provider that starts workers in the simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turboserve import subjects
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
from turboserve.bench.simulate.kernel import Kernel, Program, sleep
from turboserve.bench.simulate.network import Network
from turboserve.contracts import requests
from turboserve.contracts.errors import NotFoundError, TurboServeError, WorkerGoneError
from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.workers import LoadReport

TICK_S = 0.5
GRACE_S = 3.0


@dataclass
class Member:
    """A worker's process as the provider knows it."""

    slot: str
    program: Program
    stop: Callable[[], None]
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
    """The autoscaler's shell in small: one pool core per life."""

    def __init__(
        self,
        program: Program,
        network: Network,
        provider: Provider,
        make_core: Callable[[], Pool],
        size: int,
    ) -> None:
        self.program, self.network, self.provider = program, network, provider
        self.core = make_core()
        self.size = size
        self.on_command: Callable[[Command], None] = lambda _command: None
        self._make_core = make_core

    def boot(self) -> None:
        self.core = self._make_core()
        self.feed(SizeWanted(self.size, "configured"))
        self.program.every(TICK_S, lambda: self.feed(Tick()))

    def resize(self, size: int) -> None:
        self.size = size
        self.program.after(0.0, lambda: self.feed(SizeWanted(size, "asked for")))

    def feed(self, event: Event) -> None:
        for command in self.core.handle(event, self.program.kernel.now):
            self.on_command(command)
            self.program.spawn(self._execute(command))

    def load(self, report: LoadReport) -> None:
        self.feed(LoadReported(report))

    def feedback(self, feedback: LoadFeedback) -> None:
        """The scheduler's word about the load."""

    def exited(self, worker: str, status: str) -> None:
        self.feed(Exited(worker, status))

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

    async def _call(self, name: str, request: object) -> tuple:  # type: ignore[type-arg]
        found: tuple = await self.network.call(self.program, "state-store", name, request)  # type: ignore[type-arg]
        return found
