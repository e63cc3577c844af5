"""The pool's core against a model of provider, processes and store, on a virtual clock, under faults.

A failing seed is replayed by its number.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from turboserve.autoscaler.policy import Policy
from turboserve.autoscaler.status import pool_status
from turboserve.contracts.pool import SlotPhase
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
    slot: str
    ready_at: float | None
    alive: bool = True


class World:
    def __init__(self, seed: int, faults: Faults, size: int, policy: Policy | None = None) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.policy = policy or Policy(ready_timeout_s=20.0, drain_deadline_s=30.0)
        self.now = 0.0
        self.size = size
        self.processes: dict[str, Process] = {}
        self.rows: dict[str, WorkerRecord] = {}
        self.held: dict[str, tuple[int, int]] = {}
        self.launches = 0
        self.releases: list[tuple[str, str]] = []
        self.trace: list[str] = []
        self.store_up = True
        self.generation = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self.pool = self._new_pool()
        self.at(0.0, self.tick)
        self.at(1.0, self.second)

    def _new_pool(self) -> Pool:
        pool = Pool("local", lambda: f"wrk_{next(self._names)}", self.policy)
        self.at(0.0, lambda: self.feed(SizeWanted(self.size, "test"), self.generation))
        return pool

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def delay(self) -> float:
        return self.random.expovariate(20.0)

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
        """kill -9 of the autoscaler: what it had under way may or may not be done."""
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
        """Scale-in never removes a worker that holds a session (the design, invariant 9)."""
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
            case Launch(ticket, slot, worker):
                doubles = [p for p in self.processes.values() if p.alive and p.slot == slot]
                # Only what a killed autoscaler had under way may be in the way; a provider refuses it then.
                assert not doubles or self.generation > 0, f"{slot} would have two: {doubles}"
                if doubles:
                    return Failed(ticket, "occupied")
                self.start(slot, worker)
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
            case ListMembers(ticket):
                living = [p for p in self.processes.values() if p.alive]
                return Listed(ticket, tuple(Living(p.slot, p.worker, 1) for p in living))
            case ListWorkers(ticket):
                return WorkersListed(ticket, tuple(self.live_rows()))
        raise AssertionError(command)

    def start(self, slot: str, worker: str) -> None:
        self.launches += 1
        if self.chance(self.faults.crash_at_start):
            self.processes[worker] = Process(worker, slot, None)
            self.at(0.1, lambda: self.end(worker, told=True))
            return
        ready_at = None if self.chance(self.faults.never_ready) else self.now + self.random.uniform(0.5, 5)
        self.processes[worker] = Process(worker, slot, ready_at)

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
        """Processes renew, sessions come and go, and the faults of this second happen."""
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
            self.store_up = False
            self.at(self.random.uniform(1, 15), self.store_returns)

    def store_returns(self) -> None:
        self.store_up = True

    def renew(self, process: Process) -> None:
        row = self.rows.get(process.worker)
        if row is not None and row.phase is WorkerPhase.GONE:
            # Told that it is gone, it ends by itself.
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
                pool_slot=process.slot,
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
        self.faults = NONE
        for process in self.processes.values():
            if process.alive and process.ready_at is None:
                # A worker that hangs goes on hanging: only the time-out ends it.
                continue

    def ready(self) -> list[Process]:
        return [p for p in self.processes.values() if p.alive and p.ready_at and p.ready_at <= self.now]

    def phases(self) -> list[SlotPhase]:
        return [slot.phase for slot in self.pool.slots.values()]


def play(seed: int, faults: Faults, seconds: int = 120) -> World:
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
    assert world.phases() == [SlotPhase.READY] * world.size
    assert {row.id for row in world.live_rows()} == {process.worker for process in alive}


@pytest.mark.parametrize("seed", range(25))
def test_under_faults_no_session_is_harmed_and_afterwards_the_pool_is_whole(seed: int) -> None:
    settle(play(seed, MANY))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    faults=st.builds(
        Faults,
        store_down=st.sampled_from((0.0, 0.1)),
        provider_fails=st.sampled_from((0.0, 0.3)),
        lost_answer=st.sampled_from((0.0, 0.3)),
        crash=st.sampled_from((0.0, 0.05)),
        crash_at_start=st.sampled_from((0.0, 0.5)),
        never_ready=st.sampled_from((0.0, 0.3)),
        lost_exit=st.sampled_from((0.0, 1.0)),
        lost_load=st.sampled_from((0.0, 1.0)),
        restart=st.sampled_from((0.0, 0.1)),
        declared_gone=st.sampled_from((0.0, 0.03)),
    ),
)
def test_any_mixture_of_faults(seed: int, faults: Faults) -> None:
    settle(play(seed, faults, seconds=60))


def test_the_same_seed_gives_the_same_decisions() -> None:
    assert play(3, MANY).trace == play(3, MANY).trace


def test_a_calm_pool_does_nothing() -> None:
    world = World(1, NONE, size=3)
    world.run(600)
    assert world.launches == 3
    assert world.releases == []


def test_a_worker_that_crashes_at_every_start_is_tried_ever_less_often() -> None:
    world = World(1, Faults(crash_at_start=1.0), size=1)
    world.run(60)
    first = world.launches
    world.run(300)
    assert 5 <= first <= 10
    assert world.launches - first <= 300 / world.policy.backoff_limit_s + 1
    [slot] = pool_status(world.pool, "model", True, world.now, 1e9).slots
    assert slot.failures > 5
    assert slot.retry_in_s is None or slot.retry_in_s <= world.policy.backoff_limit_s


def test_a_worker_that_never_becomes_ready_is_replaced() -> None:
    world = World(1, Faults(never_ready=1.0), size=1)
    world.run(19)
    assert world.launches == 1
    world.run(6)
    assert world.launches == 2
    assert [reason for _, reason in world.releases] == ["not ready within 20 s"]
    world.calm()
    world.run(40)
    assert world.phases() == [SlotPhase.READY]


def test_a_stable_worker_that_dies_is_replaced_at_once() -> None:
    world = World(1, NONE, size=1)
    world.run(60)
    [process] = world.ready()
    world.end(process.worker, told=True)
    world.run(1.0)
    assert world.launches == 2
    assert world.rows[process.worker].phase is WorkerPhase.GONE


def test_no_metrics_at_all_never_shrink_the_pool() -> None:
    world = World(1, NONE, size=3)
    world.run(30)
    world.store_up = False
    world.faults = Faults(lost_load=1.0)
    world.run(3600)
    assert len(world.ready()) == 3
    assert world.releases == []


def test_a_drain_waits_for_the_last_session_and_reports_that_it_takes_long() -> None:
    world = World(1, NONE, size=2)
    world.run(15)
    workers = [process.worker for process in world.ready()]
    busy = dict.fromkeys(workers, (1, 1))
    world.serve_sessions = lambda worker, phase: world.held.update(busy)  # type: ignore[method-assign]
    world.run(5)
    world.resize(1)
    world.run(100)
    assert len(world.ready()) == 2
    assert [action.action for action in world.pool.actions].count("extend") >= 3
    [draining] = [s for s in world.pool.slots.values() if s.phase is SlotPhase.DRAINING]
    doomed = draining.worker
    assert doomed is not None
    busy[doomed] = (0, 1)
    world.run(10)
    assert len(world.ready()) == 2
    busy[doomed] = (0, 0)
    world.run(10)
    assert [p.worker for p in world.ready()] == [w for w in workers if w != doomed]
    assert world.phases() == [SlotPhase.READY]


def test_a_drain_cannot_be_taken_back_so_another_worker_comes() -> None:
    world = World(1, NONE, size=1)
    world.run(15)
    [first] = world.ready()
    world.serve_sessions = lambda worker, phase: world.held.update({first.worker: (1, 0)})  # type: ignore[method-assign]
    world.run(2)
    world.resize(0)
    world.run(5)
    world.resize(1)
    world.run(15)
    assert len(world.ready()) == 2
    assert sorted(world.phases()) == sorted([SlotPhase.DRAINING, SlotPhase.READY])


def test_an_autoscaler_that_was_killed_adopts_and_starts_no_doubles() -> None:
    world = World(1, NONE, size=3)
    world.run(30)
    before = {process.worker for process in world.ready()}
    world.restart()
    world.run(30)
    assert {process.worker for process in world.ready()} == before
    assert world.launches == 3


def test_killed_in_the_middle_of_a_launch_it_finds_what_was_started() -> None:
    world = World(1, NONE, size=1)
    while not world.processes:
        world.run(0.01)
    world.restart()
    world.run(30)
    assert world.launches == 1
    assert world.phases() == [SlotPhase.READY]


def test_a_row_without_a_process_is_declared_gone() -> None:
    """As after a restart of the machine."""
    world = World(1, NONE, size=1)
    world.rows["wrk_old"] = WorkerRecord(
        id="wrk_old",
        model="m",
        phase=WorkerPhase.READY,
        capacity=4,
        pool_slot="local-0",
        started_at=1,
        renewed_at=1,
    )
    world.rows["wrk_other"] = WorkerRecord(
        id="wrk_other",
        model="m",
        phase=WorkerPhase.READY,
        capacity=4,
        pool_slot="ray-0",
        started_at=1,
        renewed_at=1,
    )
    world.run(20)
    assert world.rows["wrk_old"].phase is WorkerPhase.GONE
    assert world.rows["wrk_other"].phase is WorkerPhase.READY


def test_a_size_out_of_range_changes_nothing() -> None:
    world = World(1, NONE, size=1)
    world.run(10)
    with pytest.raises(ValueError, match="size: -1"):
        world.resize(-1)
    world.run(10)
    assert world.phases() == [SlotPhase.READY]
