"""One simulated deployment: all services, their servers, users, and what goes wrong."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.policy import Policy as PoolPolicy
from turboserve.bench.simulate.autoscaler import AutoscalerProcess, Member, Provider
from turboserve.bench.simulate.engine import Chunk
from turboserve.bench.simulate.faults import CALM, Faults, draw
from turboserve.bench.simulate.gateway import Gateway
from turboserve.bench.simulate.invariants import Checker
from turboserve.bench.simulate.kernel import Kernel, Program
from turboserve.bench.simulate.log import Entry, Stream
from turboserve.bench.simulate.network import Network
from turboserve.bench.simulate.scheduler import SchedulerProcess
from turboserve.bench.simulate.store.database import Database
from turboserve.bench.simulate.store.hot import HotStore, Latents
from turboserve.bench.simulate.store.process import Store
from turboserve.bench.simulate.troubles import Troubles
from turboserve.bench.simulate.users import Users
from turboserve.bench.simulate.worker import Worker
from turboserve.contracts.events import WorkerJoined, WorkerLeft
from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.workers import Assignment, LoadReport, WorkerPhase
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.placement import MinMax, MinMaxRebalancer, Weights
from turboserve.scheduler.policy import Policy
from turboserve.subjects import CHUNK, CHUNKS, EVENTS

HEARTBEAT_S = 1.0
STALE_S = 4.0
POLICY = Policy(
    worker_timeout_s=6.0,
    starting_timeout_s=30.0,
    lease_s=4.0,
    idle_after_s=10.0,
    resync_s=6.0,
    retry_limit_s=4.0,
    refused_limit_s=8.0,
    move_limit_s=8.0,
    move_rest_s=4.0,
)
POOL_POLICY = PoolPolicy(ready_timeout_s=12.0, drain_deadline_s=20.0, stable_s=10.0, backoff_limit_s=4.0)
CONTROL_POLICY = ControlPolicy(
    most=1, in_cooldown_s=6.0, in_window_s=6.0, peak_window_s=6.0, out_cooldown_s=2.0, stale_s=STALE_S
)
WORKERS = (1, 2, 3)
"""At least."""
GROWTH = (0, 1, 2)
"""Workers more at most."""
SLOTS = (1, 2, 3)
START_S = (0.5, 2.0)
PLACED = ("place", "resume", "recover")


@dataclass
class World:
    """Everything of one run. `Troubles` breaks it, `Users` use it, `Checker` watches."""

    seed: int
    keep_lines: bool = False
    faults: Faults | None = None
    """None: drawn from the seed."""
    capacity: dict[str, int] = field(default_factory=dict)
    """Worker → its slots."""
    seeds: dict[str, int] = field(default_factory=dict)
    """Session → the seed of its video."""
    made_when_calm: dict[str, int] = field(default_factory=dict)
    """Session → chunks in the log when the faults stopped."""

    def __post_init__(self) -> None:
        self.kernel = Kernel(self.seed, self.keep_lines)
        chance = self.kernel.random
        self.faults = self.faults or draw(chance)
        self.network = Network(self.kernel)
        self.network.faults = self.faults
        self.database = Database(self.kernel)
        self.hot = HotStore()
        self.chunks = Stream(CHUNKS, self.network)
        self.events = Stream(EVENTS, self.network)
        self.workers: dict[str, Worker] = {}
        self.checker = Checker(self)
        self._numbers = itertools.count(1)
        self._slots = chance.choice(SLOTS)
        self._build(chance.choice(WORKERS))
        self.troubles = Troubles(self)
        self.users = Users(self)

    def _build(self, size: int) -> None:
        kernel, network = self.kernel, self.network
        self.store = Store(
            self._program("state-store", "store"),
            network,
            self.database,
            self.hot,
            self.chunks,
            self.events,
            self._assign,
            POLICY.lease_s,
            POLICY.worker_timeout_s,
        )
        self.schedulers = [self._scheduler(name) for name in ("scheduler-a", "scheduler-b")]
        self.provider = Provider(kernel, network, self._start_worker)
        self.autoscaler = AutoscalerProcess(
            self._program("autoscaler", "autoscaler"),
            network,
            self.provider,
            lambda: Pool("local", lambda: f"wrk_{next(self._numbers)}", POOL_POLICY),
            replace(CONTROL_POLICY, least=size, most=size + self.kernel.random.choice(GROWTH)),
            size,
        )
        self.gateway = Gateway(
            self._program("gateway", "gateway"),
            network,
            self.chunks,
            self.events,
        )
        self.services = [
            self.store.program,
            *(process.program for process in self.schedulers),
            self.autoscaler.program,
            self.gateway.program,
        ]
        self.database.on_row = self.checker.row
        self.database.on_gone = self.checker.buried
        self.chunks.on_append = self.checker.appended
        self.events.on_append = self._told
        network.on_publish = self._published
        self.autoscaler.on_command = self.checker.pool_says
        self.autoscaler.on_resize = self.checker.resized
        self.gateway.on_delivered = self.checker.delivered
        self.gateway.on_playhead = self._playhead
        processes: tuple[Store | SchedulerProcess | AutoscalerProcess | Gateway, ...]
        processes = (self.store, *self.schedulers, self.autoscaler, self.gateway)
        for process in processes:
            process.program.boot = process.boot
            process.program.start()

    def _program(self, name: str, kind: str) -> Program:
        program = Program(self.kernel, name, kind)
        program.on_error = lambda where, error: self.checker.fail("no_core_fails", f"{where.name}: {error!r}")
        if kind != "worker":
            program.on_death = lambda dead, _why: self.kernel.at(
                self.kernel.random.uniform(0.1, 2.0), dead.start
            )
        return program

    def _scheduler(self, name: str) -> SchedulerProcess:
        program = self._program(name, "scheduler")
        process = SchedulerProcess(program, self.network, self.events, _core)
        process.on_command = self.checker.scheduler_says
        return process

    # Workers

    def _start_worker(self, slot: str, name: str) -> Member:
        chance = self.kernel.random
        program = self._program(name, "worker")
        worker = Worker(
            program,
            self.network,
            self.chunks,
            self._slots,
            slot,
            POLICY.lease_s,
            HEARTBEAT_S,
            lambda report: self._report(program, report),
            self._latents,
            self.workers.get,
        )
        worker.engine.on_chunk = lambda session: self.checker.begins_chunk(worker, session)
        self.workers[name] = worker
        self.capacity[name] = self._slots
        program.on_death = self._exited
        program.start()
        if chance.random() < self.network.faults.crash_at_start:
            self.kernel.at(0.1, lambda: program.kill("cannot start"))
        else:
            never = chance.random() < self.network.faults.never_ready
            worker.load_model(math.inf if never else chance.uniform(*START_S))
        return Member(slot, program, lambda: worker.program.spawn(worker.stop()))

    def _exited(self, program: Program, why: str) -> None:
        manager = self.autoscaler.program
        if manager.up:
            manager.after(self.network.delay(), lambda: self.autoscaler.exited(program.name, why))

    # Hints

    def _assign(self, name: str, assignment: Assignment) -> None:
        worker = self.workers.get(name)
        if worker is not None:
            self.network.hint(self.store.program, worker.program, lambda: worker.assigned(assignment))

    def _report(self, source: Program, report: LoadReport) -> None:
        for process in self.schedulers:
            self._load_to(process, source, report)
        self.network.hint(source, self.autoscaler.program, lambda: self.autoscaler.load(report))

    def _load_to(self, process: SchedulerProcess, source: Program, report: LoadReport) -> None:
        self.network.hint(source, process.program, lambda: process.load(report))

    def _published(self, source: Program, topic: object, message: object) -> None:
        """A hint that an executor publishes."""
        if isinstance(message, LoadFeedback):
            self.network.hint(source, self.autoscaler.program, lambda: self.autoscaler.feedback(message))

    def _latents(self, source: Program, session: str, latents: Latents) -> None:
        self.network.hint(source, self.store.program, lambda: self.store.latents(session, latents))

    def _playhead(self, session: str, playhead_s: float, viewers: int) -> None:
        source = self.gateway.program
        self.network.hint(
            source, self.store.program, lambda: self.store.playhead(session, playhead_s, viewers)
        )
        for process in self.schedulers:
            self._watched(process, session, viewers)
        for worker in self.workers.values():
            if worker.program.up and session in worker.table.entries:
                self._playhead_to(worker, session, playhead_s, viewers)

    def _watched(self, process: SchedulerProcess, session: str, viewers: int) -> None:
        source = self.gateway.program
        self.network.hint(source, process.program, lambda: process.playhead(session, viewers))

    def _playhead_to(self, worker: Worker, session: str, playhead_s: float, viewers: int) -> None:
        self.network.hint(
            self.gateway.program, worker.program, lambda: worker.playhead(session, playhead_s, viewers)
        )

    def _told(self, entry: Entry) -> None:
        """An event is in the log."""
        event = entry.body
        if not isinstance(event, WorkerJoined | WorkerLeft):
            manager = self.autoscaler.program
            self.network.hint(manager, manager, lambda: self.autoscaler.happened(event))

    # Looking

    def free_slots(self) -> int:
        """Slots of living workers that take sessions and that no session holds."""
        return sum(
            max(0, row.capacity - self.database.slots_used(row.id))
            for row in self.database.workers.values()
            if row.phase is WorkerPhase.READY and row.id in self.workers and self.workers[row.id].program.up
        )

    def is_watched(self, session: str) -> bool:
        return any(
            viewer.session == session and self.gateway.connected(viewer) for viewer in self.users.viewers
        )

    def calm(self) -> None:
        """No faults from here on; what is broken is repaired as in production, by those who are there."""
        self.kernel.note("calm")
        self.network.faults = CALM
        self.troubles.stop()
        self.made_when_calm = {
            record.id: len(self.chunks.by_subject.get(CHUNK.of(record.id), ()))
            for record in self.database.rows()
        }

    def counts(self) -> dict[str, int]:
        """What took place in this run."""
        return {
            "sessions": len(self.database.sessions),
            "chunks": sum(isinstance(entry.body, Chunk) for entry in self.chunks.entries),
            "placements": sum(d.kind in PLACED for d in self.database.decisions.values()),
            "moves": self.checker.moves,
            "workers": len(self.workers),
            "kills": self.troubles.kills,
        }

    def close(self) -> None:
        for program in [*self.services, *(worker.program for worker in self.workers.values())]:
            program.discard()


def _core() -> Scheduler:
    """As the scheduler's service makes it."""
    rebalancer = MinMaxRebalancer(Weights(moves_at_once=POLICY.moves_at_once))
    return Scheduler(MinMax(rebalancer), POLICY, rebalancer, rebalancer.links)
