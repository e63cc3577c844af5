"""The surroundings of the pool's core, on a virtual clock, under faults."""

from __future__ import annotations

from dataclasses import dataclass

from tests.helpers.virtual_world import VirtualWorld
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.lifecycle import Policy
from turboserve.autoscaler.messages import (
    Command,
    DeclareGone,
    Done,
    Drain,
    Event,
    Exited,
    Failed,
    Launch,
    ListProviderWorkers,
    ListWorkers,
    LoadReported,
    ProviderWorkersListed,
    Release,
    Reserve,
    RunningWorker,
    SizeWanted,
    Tick,
    WorkersListed,
)
from turboserve.autoscaler.status import pool_status
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord


@dataclass(frozen=True)
class Faults:
    """Probabilities, per command or per process and second."""

    store_down: float = 0.0
    provider_fails: float = 0.0
    lost_answer: float = 0.0
    crash: float = 0.0
    crash_at_start: float = 0.0
    never_ready: float = 0.0
    lost_exit: float = 0.0
    lost_load: float = 0.0
    restart: float = 0.0
    declared_gone: float = 0.0


NONE = Faults()
MANY = Faults(0.05, 0.1, 0.1, 0.02, 0.2, 0.1, 0.3, 0.5, 0.02, 0.01)


@dataclass
class Process:
    worker: str
    member: str
    ready_at: float | None
    alive: bool = True


class World(VirtualWorld):
    """Provider, processes and store, and the faults of each."""

    def __init__(self, seed: int, faults: Faults, size: int, policy: Policy | None = None) -> None:
        super().__init__(seed)
        self.faults = faults
        self.policy = policy or Policy(ready_timeout_s=20.0, drain_deadline_s=30.0)
        self.size = size
        self.processes: dict[str, Process] = {}
        self.rows: dict[str, WorkerRecord] = {}
        self.held: dict[str, tuple[int, int]] = {}
        self.launches = 0
        self.releases: list[tuple[str, str]] = []
        self.pool = self._new_pool()
        self.at(0.0, self.tick)
        self.at(1.0, self.second)

    def _new_pool(self) -> Pool:
        pool = Pool("local", lambda: f"wrk_{next(self.names)}", self.policy)
        self.at(0.0, lambda: self.feed(SizeWanted(self.size, "test"), self.generation))
        return pool

    def delay(self) -> float:
        return self.delay_around(0.05)

    def tick(self) -> None:
        self.feed(Tick(), self.generation)
        self.at(0.25, self.tick)

    def feed(self, event: Event, generation: int) -> None:
        if generation != self.generation:
            return
        for command in self.pool.handle(event, self.now):
            self.trace.append(f"{self.now:.3f} {command}")
            self.carry_out(command)

    def resize(self, size: int) -> None:
        self.size = size
        self.feed(SizeWanted(size, "test"), self.generation)

    def restart(self) -> None:
        """Restart the autoscaler as after kill -9: actions under way may or may not take effect."""
        self.generation += 1
        self.pool = self._new_pool()

    # Carrying out

    def carry_out(self, command: Command) -> None:
        generation = self.generation
        if isinstance(command, Release) and command.worker is not None:
            self.check_release(command.worker, command.reason)

        def finish() -> None:
            event = self.execute(command)
            if self.chance(self.faults.lost_answer):
                event = Failed(command.ticket, "no answer")
            self.at(self.delay(), lambda: self.feed(event, generation))

        self.at(self.delay(), finish)

    def check_release(self, worker: str, reason: str) -> None:
        """Check that scale-in never removes a worker that holds a session (the design, invariant 9)."""
        self.releases.append((worker, reason))
        process, row = self.processes.get(worker), self.rows.get(worker)
        alive = process is not None and process.alive
        if alive and row is not None and row.phase is not WorkerPhase.GONE:
            assert sum(self.held.get(worker, (0, 0))) == 0, (
                f"{worker} holds sessions and is released: {reason}"
            )

    def execute(self, command: Command) -> Event:
        of_store = isinstance(command, Drain | DeclareGone | ListWorkers)
        if of_store and not self.store_up:
            return Failed(command.ticket, "the store is down")
        if not of_store and self.chance(self.faults.provider_fails):
            return Failed(command.ticket, "the provider has the hiccups")
        match command:
            case Reserve(ticket):
                return Done(ticket)
            case Launch(ticket, member, worker):
                doubles = [p for p in self.processes.values() if p.alive and p.member == member]
                # Only actions of a killed autoscaler may collide; a provider then refuses them.
                assert not doubles or self.generation > 0, f"{member} would have two: {doubles}"
                if doubles:
                    return Failed(ticket, "occupied")
                self.start(member, worker)
                return Done(ticket, pid=self.launches)
            case Release(ticket, _, worker):
                if worker is not None and worker in self.processes:
                    self.end(worker, told=not self.chance(self.faults.lost_exit))
                return Done(ticket)
            case Drain(ticket, _, worker):
                row = self.rows.get(worker)
                if row is None or row.phase is WorkerPhase.GONE:
                    return Failed(ticket, "unknown", missing=True)
                self.rows[worker] = row.model_copy(update={"phase": WorkerPhase.DRAINING})
                return Done(ticket)
            case DeclareGone(ticket, worker, _):
                if worker not in self.rows:
                    return Failed(ticket, "unknown", missing=True)
                self.gone(worker)
                return Done(ticket)
            case ListProviderWorkers(ticket):
                living = [p for p in self.processes.values() if p.alive]
                return ProviderWorkersListed(
                    ticket, tuple(RunningWorker(p.member, p.worker, 1) for p in living)
                )
            case ListWorkers(ticket):
                return WorkersListed(ticket, tuple(self.live_rows()))
        raise AssertionError(command)

    def start(self, member: str, worker: str) -> None:
        self.launches += 1
        if self.chance(self.faults.crash_at_start):
            self.processes[worker] = Process(worker, member, None)
            self.at(0.1, lambda: self.end(worker, told=True))
            return
        ready_at = None if self.chance(self.faults.never_ready) else self.now + self.random.uniform(0.5, 5)
        self.processes[worker] = Process(worker, member, ready_at)

    def end(self, worker: str, told: bool) -> None:
        process = self.processes[worker]
        if process.alive:
            process.alive = False
            if told:
                generation = self.generation
                self.at(self.delay(), lambda: self.feed(Exited(worker, "ended"), generation))

    def gone(self, worker: str) -> None:
        self.rows[worker] = self.rows[worker].model_copy(update={"phase": WorkerPhase.GONE})
        self.held.pop(worker, None)

    def live_rows(self) -> list[WorkerRecord]:
        return [
            row.model_copy(
                update=dict(zip(("sessions", "suspended"), self.held.get(row.id, (0, 0)), strict=True))
            )
            for row in self.rows.values()
            if row.phase is not WorkerPhase.GONE
        ]

    def second(self) -> None:
        """Simulate one second: processes renew, sessions begin and end, and faults occur."""
        assert pool_status(self.pool, "model", True, self.now, 1e9 + self.now).to_bytes()
        self.at(1.0, self.second)
        for process in [p for p in self.processes.values() if p.alive]:
            if self.chance(self.faults.crash):
                self.end(process.worker, told=not self.chance(self.faults.lost_exit))
            else:
                self.renew(process)
        if self.chance(self.faults.restart):
            self.restart()
        if self.store_up and self.chance(self.faults.store_down):
            self.lose_store(1, 15)

    def renew(self, process: Process) -> None:
        row = self.rows.get(process.worker)
        if row is not None and row.phase is WorkerPhase.GONE:
            # Informed that it is gone, the worker ends by itself.
            self.end(process.worker, told=True)
            return
        ready = process.ready_at is not None and process.ready_at <= self.now
        phase = WorkerPhase.READY if ready else WorkerPhase.STARTING
        if row is not None and row.phase is WorkerPhase.DRAINING:
            phase = WorkerPhase.DRAINING
        if self.store_up:
            self.rows[process.worker] = WorkerRecord(
                id=process.worker,
                model="m",
                phase=phase,
                capacity=4,
                pool_member=process.member,
                started_at=1.0,
                renewed_at=self.now,
            )
            self.serve_sessions(process.worker, phase)
            if self.chance(self.faults.declared_gone):
                self.gone(process.worker)
        if process.worker in self.rows and not self.chance(self.faults.lost_load):
            report = LoadReport(worker=process.worker, model="m", capacity=4, phase=phase)
            generation = self.generation
            self.at(self.delay(), lambda: self.feed(LoadReported(report), generation))

    def serve_sessions(self, worker: str, phase: WorkerPhase) -> None:
        active, suspended = self.held.get(worker, (0, 0))
        if phase is WorkerPhase.READY and self.chance(0.3):
            active = min(active + 1, 4)
        if active and self.chance(0.1):
            active, suspended = active - 1, suspended + 1
        if self.chance(0.2):
            active, suspended = max(active - 1, 0), max(suspended - 1, 0)
        self.held[worker] = (active, suspended)

    # Looking

    def calm(self) -> None:
        """End all faults. A worker that hangs continues to hang: only the timeout ends it."""
        self.faults = NONE

    def ready(self) -> list[Process]:
        return [p for p in self.processes.values() if p.alive and p.ready_at and p.ready_at <= self.now]

    def phases(self) -> list[PoolMemberPhase]:
        return [member.phase for member in self.pool.members.values()]


def run_scenario(seed: int, faults: Faults, seconds: int = 120) -> World:
    world = World(seed, faults, size=3)
    for _ in range(seconds):
        world.run(1.0)
        if world.chance(0.05):
            world.resize(world.random.randrange(6))
    return world


def settle(world: World) -> None:
    world.calm()
    world.run(150)
    alive = [p for p in world.processes.values() if p.alive]
    assert len(alive) == world.size, f"{len(alive)} processes, {world.size} wanted: {world.phases()}"
    assert world.phases() == [PoolMemberPhase.READY] * world.size
    assert {row.id for row in world.live_rows()} == {process.worker for process in alive}
