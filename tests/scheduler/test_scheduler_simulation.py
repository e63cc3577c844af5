"""The scheduler's core against a model of everything around it, on a virtual clock, under faults.

The model of the store keeps the real one's rules (compare-and-set on the version, capacity by rows); messages
are delayed, lost, doubled and reordered; workers die, fall silent, drain and join; sessions move, and their
copies take long or fail; the scheduler is restarted and held up.
A failing seed is replayed by its number.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import (
    LoadReport,
    MoveReport,
    MoveStage,
    Refusal,
    WorkerPhase,
    WorkerRecord,
)
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import (
    AbandonMove,
    AllListed,
    Answered,
    BeginMove,
    Command,
    CommitMove,
    DeclareGone,
    Event,
    ListAll,
    ListWorkers,
    LoadReported,
    Note,
    OfSession,
    Place,
    ReadSession,
    Refused,
    Report,
    SessionChanged,
    SuspendIdle,
    Tick,
    Watched,
    WorkerChanged,
    WorkersListed,
)
from turboserve.scheduler.placement import LeastLoaded, MinMaxRebalancer
from turboserve.scheduler.policy import Policy

MODEL = "quiet"
WALL = 1_700_000_000.0
DEADLINE_S = 3.0


@dataclass(frozen=True)
class Faults:
    """Probabilities, per message or per second."""

    delay_s: float = 0.02
    lost_answer: float = 0.0
    lost_command: float = 0.0
    lost_load: float = 0.0
    lost_event: float = 0.0
    doubled_event: float = 0.0
    store_down: float = 0.0
    death: float = 0.0
    silence: float = 0.0
    restart: float = 0.0
    pause: float = 0.0
    refusal: float = 0.0
    drain: float = 0.0
    failed_copy: float = 0.0
    slow_copy: float = 0.0
    stale_copy: float = 0.0


NONE = Faults()
MANY = Faults(0.3, 0.1, 0.1, 0.2, 0.1, 0.2, 0.01, 0.01, 0.01, 0.01, 0.01, 0.02, 0.01, 0.1, 0.1, 0.1)
OVER = {"target": None, "move": None}


@dataclass
class Worker:
    id: str
    capacity: int
    alive: bool = True
    heard: bool = True
    renewed_at: float = 0.0
    phase: WorkerPhase = WorkerPhase.READY
    refused: set[tuple[str, int]] = field(default_factory=set)

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            model=MODEL,
            phase=self.phase,
            capacity=self.capacity,
            transfer=("here",),
            started_at=WALL,
            renewed_at=WALL + self.renewed_at,
        )


class World:
    """Store, workers, users and network; `now` is the virtual time."""

    def __init__(self, seed: int, faults: Faults, workers: int = 3, policy: Policy | None = None) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.policy = policy or Policy(idle_after_s=1e9)
        self.now = 0.0
        self.trace: list[str] = []
        self.rows: dict[str, SessionRecord] = {}
        self.workers: dict[str, Worker] = {}
        self.no_capacity = 0
        self.placements = 0
        self.copies: dict[tuple[str, int], MoveStage] = {}
        """Session and move → what its target has made of it."""
        self.moved: list[tuple[float, str]] = []
        """When which session's move was committed."""
        self.moving_since: dict[str, float] = {}
        self.store_up = True
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self.generation = 0
        self.paused_until = 0.0
        self._outstanding: set[str] = set()
        for _ in range(workers):
            self.join()
        self.core = self.scheduler()
        self.at(0.0, self.tick)
        self.at(1.0, self.beat)

    # Time

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
        return self.random.expovariate(1 / self.faults.delay_s)

    # The scheduler and its network

    def scheduler(self) -> Scheduler:
        rebalancer = MinMaxRebalancer()
        return Scheduler(LeastLoaded(), self.policy, rebalancer, rebalancer.links)

    def tick(self) -> None:
        self.feed(Tick(), self.generation)
        self.at(0.25, self.tick)

    def feed(self, event: Event, generation: int) -> None:
        if generation != self.generation:
            return
        if self.now < self.paused_until:
            if not isinstance(event, Tick):
                self.at(self.paused_until - self.now, lambda: self.feed(event, generation))
            return
        for command in self.core.handle(event, self.now):
            self.check(command)
            self.carry_out(command)

    def check(self, command: Command) -> None:
        """What has to hold of every command when it is given."""
        if isinstance(command, Report):
            # A request that was given up, or made in an earlier life, may take effect after its slot was
            # promised to another: then both are counted until the store has refused one of them.
            in_time = not (self.faults.lost_answer or self.faults.restart)
            assert command.feedback.rho_max <= 1.0 or not in_time
            return
        if isinstance(command, Note):
            return
        if isinstance(command, Place):
            worker = self.core.view.workers[command.worker]
            assert worker.load <= worker.capacity, f"{worker.id} overfilled"
            assert command.session in worker.reserved
        if isinstance(command, BeginMove):
            worker = self.core.view.workers[command.worker]
            assert worker.load <= worker.capacity, f"{worker.id} overfilled"
            assert command.decision.reason
        if isinstance(command, CommitMove):
            assert self.copies.get((command.session, command.move)) is MoveStage.VERIFIED, "not verified"
        if isinstance(command, OfSession):
            assert command.session not in self._outstanding, "two commands for one session"
            self._outstanding.add(command.session)
        if isinstance(command, DeclareGone) and command.worker in self.workers:
            silent_s = self.now - self.workers[command.worker].renewed_at
            assert silent_s >= self.policy.lease_s, f"taken over within the lease: {silent_s}"
        self.trace.append(f"{self.now:.3f} {command}")

    def carry_out(self, command: Command) -> None:
        if isinstance(command, Note | Report):
            return
        generation = self.generation

        def answer(event: Event) -> None:
            if isinstance(command, OfSession) and generation == self.generation:
                self._outstanding.discard(command.session)
            self.feed(event, generation)

        def failed(refused: Refused) -> None:
            answer(Answered(command.ticket, refused=refused))

        if not self.store_up:
            self.at(self.delay(), lambda: failed(Refused.NOT_SENT))
            return
        if self.chance(self.faults.lost_command):
            self.at(DEADLINE_S, lambda: failed(Refused.UNKNOWN))
            return
        lost = self.chance(self.faults.lost_answer)

        def execute() -> None:
            event = self.serve(command)
            if lost or self.now - sent > DEADLINE_S:
                self.at(max(sent + DEADLINE_S - self.now, 0.0), lambda: failed(Refused.UNKNOWN))
            else:
                self.at(self.delay(), lambda: answer(event))

        sent = self.now
        # Now and then a request is so late that it takes effect after its sender has given it up.
        late_s = 2 * DEADLINE_S if lost and self.chance(0.5) else 0.0
        if late_s:
            self.at(DEADLINE_S, lambda: failed(Refused.UNKNOWN))
            self.at(late_s, lambda: self.serve(command) and None)
        else:
            self.at(self.delay(), execute)

    def publish(self, event: Event) -> None:
        if self.chance(self.faults.lost_event):
            return
        for _ in range(1 + self.chance(self.faults.doubled_event)):
            self.at(self.delay(), lambda: self.feed(event, self.generation))

    def restart(self) -> None:
        self.generation += 1
        self._outstanding.clear()
        self.paused_until = 0.0
        self.core = self.scheduler()

    # The store

    def serve(self, command: Command) -> Event:
        match command:
            case Place():
                return self.place(command)
            case BeginMove():
                return self.begin_move(command)
            case CommitMove():
                return self.commit_move(command)
            case AbandonMove(ticket, session, move, _):
                row = self.rows[session]
                if row.move != move:
                    return Answered(ticket, row)
                return Answered(ticket, self.write(row, phase=self.at_rest(row)))
            case SuspendIdle(ticket, session, version):
                row = self.rows.get(session)
                if row is None or row.version != version:
                    return Answered(ticket, refused=Refused.CONFLICT)
                return Answered(ticket, self.write(row, phase=Phase.SUSPENDED, activity=Activity.IDLE))
            case ReadSession(ticket, session):
                row = self.rows.get(session)
                return Answered(ticket, row, None if row else Refused.NOT_FOUND)
            case DeclareGone(ticket, worker, _, renewed_at):
                if worker in self.workers and self.workers[worker].renewed_at > renewed_at:
                    return Answered(ticket, refused=Refused.CONFLICT)
                self.bury(worker)
                return Answered(ticket)
            case ListWorkers(ticket):
                return WorkersListed(ticket, self.living())
            case ListAll(ticket):
                rows = tuple(row for row in self.rows.values() if not row.phase.ended)
                return AllListed(ticket, self.living(), rows)
        raise AssertionError(command)

    def place(self, command: Place) -> Event:
        row, worker = self.rows[command.session], self.workers[command.worker]
        if row.version != command.expected_version or row.phase.ended:
            return Answered(command.ticket, refused=Refused.CONFLICT)
        if row.activity is not Activity.WATCHING:
            return Answered(command.ticket, refused=Refused.CONFLICT)
        if worker.phase is WorkerPhase.GONE:
            return Answered(command.ticket, refused=Refused.WORKER_GONE)
        if self.used(worker.id, besides=row.id) >= worker.capacity:
            self.no_capacity += 1
            return Answered(command.ticket, refused=Refused.NO_CAPACITY)
        assert command.decision.epoch == row.epoch + 1
        self.placements += 1
        after = self.write(row, phase=Phase.ACTIVE, worker=worker.id, epoch=row.epoch + 1)
        return Answered(command.ticket, after)

    def begin_move(self, command: BeginMove) -> Event:
        row, target = self.rows[command.session], self.workers[command.worker]
        if row.version != command.expected_version or row.move is not None:
            return Answered(command.ticket, refused=Refused.CONFLICT)
        assert row.phase in (Phase.ACTIVE, Phase.SUSPENDED)
        assert row.worker not in (None, target.id)
        if target.phase is WorkerPhase.GONE:
            return Answered(command.ticket, refused=Refused.WORKER_GONE)
        full = row.phase is Phase.ACTIVE and self.used(target.id, besides=row.id) >= target.capacity
        if full or target.phase is not WorkerPhase.READY:
            self.no_capacity += full
            return Answered(command.ticket, refused=Refused.NO_CAPACITY)
        phase = Phase.MIGRATING if row.phase is Phase.ACTIVE else row.phase
        move = row.version + 1
        after = self.write(row, phase=phase, target=target.id, move=move)
        copying_s = self.random.uniform(0.1, 60.0 if self.chance(self.faults.slow_copy) else 2.0)
        failed = self.chance(self.faults.failed_copy)

        def copied() -> None:
            # What dies while it is copied is not copied.
            if self.rows[row.id].move == move and self.workers[row.worker or ""].alive and target.alive:
                self.copies[row.id, move] = MoveStage.FAILED if failed else MoveStage.VERIFIED

        self.at(copying_s, copied)
        return Answered(command.ticket, after)

    def commit_move(self, command: CommitMove) -> Event:
        row = self.rows[command.session]
        if row.move != command.move or row.target != command.worker:
            return Answered(command.ticket, refused=Refused.CONFLICT)
        if self.chance(self.faults.stale_copy):
            return Answered(command.ticket, refused=Refused.STALE_STATE)
        assert self.workers[command.worker].phase is not WorkerPhase.GONE, "its moves ended with it"
        self.moved.append((self.now, row.id))
        after = self.write(row, phase=self.at_rest(row), worker=command.worker, epoch=row.epoch + 1)
        return Answered(command.ticket, after)

    @staticmethod
    def at_rest(row: SessionRecord) -> Phase:
        return Phase.ACTIVE if row.phase is Phase.MIGRATING else row.phase

    def write(self, row: SessionRecord, **changes: object) -> SessionRecord:
        """The row one version later. A change of phase or owner ends a move; a resume does not."""
        if "phase" in changes:
            changes = {**OVER, **changes}
        after = row.model_copy(update={**changes, "version": row.version + 1})
        assert after.epoch >= row.epoch
        assert (after.phase is Phase.MIGRATING) <= (after.target is not None)
        if after.move is None:
            self.moving_since.pop(row.id, None)
        else:
            self.moving_since.setdefault(row.id, self.now)
        self.rows[row.id] = after
        self.publish(SessionChanged(after))
        for worker in self.workers.values():
            assert self.used(worker.id) <= worker.capacity
        return after

    def used(self, worker: str, besides: str = "") -> int:
        return sum(
            worker in (row.worker, row.target) and row.phase.holds_slot and row.id != besides
            for row in self.rows.values()
        )

    def living(self) -> tuple[WorkerRecord, ...]:
        return tuple(w.record() for w in self.workers.values() if w.phase is not WorkerPhase.GONE)

    def bury(self, name: str) -> None:
        worker = self.workers[name]
        if worker.phase is not WorkerPhase.GONE:
            worker.phase, worker.alive = WorkerPhase.GONE, False
            self.publish(WorkerChanged(worker.record()))
            for row in [row for row in self.rows.values() if row.target == name]:
                self.write(row, phase=self.at_rest(row))
            # Whoever runs the pool puts another in its place.
            self.at(self.random.uniform(0.5, 5.0), self.join)

    # Workers

    def join(self) -> None:
        worker = Worker(f"wrk_{next(self._names)}", self.random.choice((2, 3, 4)), renewed_at=self.now)
        self.workers[worker.id] = worker
        self.publish(WorkerChanged(worker.record()))

    def beat(self) -> None:
        """Once a second: workers renew and report, and the faults of this second happen."""
        self.at(1.0, self.beat)
        for worker in list(self.workers.values()):
            if not worker.alive:
                continue
            if self.chance(self.faults.death):
                worker.alive = False
                continue
            if self.chance(self.faults.drain) and worker.phase is WorkerPhase.READY:
                worker.phase = WorkerPhase.DRAINING
            if worker.phase is WorkerPhase.DRAINING and not self.named(worker.id):
                self.bury(worker.id)
                continue
            if self.chance(self.faults.silence):
                worker.heard = not worker.heard
            if self.store_up:
                worker.renewed_at = self.now
            if worker.heard and not self.chance(self.faults.lost_load):
                self.at(self.delay(), self._report(worker))
        if self.chance(self.faults.restart):
            self.restart()
        if self.chance(self.faults.pause):
            self.paused_until = self.now + self.random.uniform(1, 40)
        if self.chance(self.faults.store_down) and self.store_up:
            self.store_up = False
            self.at(self.random.uniform(0.5, 10.0), self._store_returns)

    def named(self, worker: str) -> bool:
        """Whether a session is there, or on its way there."""
        return any(worker in (row.worker, row.target) and not row.phase.ended for row in self.rows.values())

    def _store_returns(self) -> None:
        self.store_up = True

    def _report(self, worker: Worker) -> Callable[[], None]:
        mine = [r for r in self.rows.values() if r.worker == worker.id and r.phase.holds_slot]
        coming = [r for r in self.rows.values() if r.target == worker.id]
        worker.refused |= {(r.id, r.epoch) for r in mine if self.chance(self.faults.refusal)}
        report = LoadReport(
            worker=worker.id,
            model=MODEL,
            capacity=worker.capacity,
            phase=worker.phase,
            transfer=("here",),
            moves=tuple(
                MoveReport(
                    session=r.id,
                    move=r.move or 0,
                    stage=self.copies.get((r.id, r.move or 0), MoveStage.COPYING),
                    bytes_moved=1_000,
                    seconds=0.5,
                )
                for r in coming
            ),
            refusals=tuple(
                Refusal(session=r.id, epoch=r.epoch, reason="full")
                for r in mine
                if (r.id, r.epoch) in worker.refused
            ),
        )
        return lambda: self.feed(LoadReported(report), self.generation)

    # Users

    def arrive(self, admit: bool = False) -> str | None:
        """A new session, if the store admits it or `admit` says so."""
        room = sum(w.capacity for w in self.workers.values() if w.phase is WorkerPhase.READY)
        if not admit and sum(self.wants_slot(row) for row in self.rows.values()) >= room:
            return None
        row = SessionRecord(
            id=f"ses_{next(self._names)}",
            tenant="t",
            model=MODEL,
            prompt="a red circle",
            seed=1,
            phase=Phase.REQUESTED,
            version=1,
            epoch=0,
            created_at=WALL + self.now,
            updated_at=WALL + self.now,
        )
        self.rows[row.id] = row
        self.publish(SessionChanged(row))
        return row.id

    def fiddle(self) -> None:
        """One thing that users do."""
        live = [row for row in self.rows.values() if not row.phase.ended]
        deed = self.random.random()
        if deed < 0.5 or not live:
            self.arrive()
            return
        row = self.random.choice(live)
        if deed < 0.7:
            self.write(row, phase=Phase.TERMINATED)
        elif deed < 0.85 and row.phase.holds_slot:
            self.write(row, phase=Phase.SUSPENDED, activity=Activity.PAUSED)
        elif row.phase is Phase.SUSPENDED and row.activity is not Activity.WATCHING:
            self.write(row, activity=Activity.WATCHING)

    @staticmethod
    def wants_slot(row: SessionRecord) -> bool:
        return not row.phase.ended and row.activity is Activity.WATCHING

    def unserved(self) -> list[SessionRecord]:
        """Sessions that should run and do not."""
        return [
            row
            for row in self.rows.values()
            if self.wants_slot(row) and not (row.phase.holds_slot and self.workers[row.worker or ""].alive)
        ]

    def free(self) -> int:
        ready = (w for w in self.workers.values() if w.alive and w.phase is WorkerPhase.READY)
        return sum(w.capacity - self.used(w.id) for w in ready)

    def slow_moves(self) -> dict[str, float]:
        """Sessions that have been moving for longer than any move may, and for how long."""
        limit_s = self.policy.move_limit_s + 2 * self.policy.resync_s
        ages = {name: self.now - since for name, since in self.moving_since.items()}
        return {name: age_s for name, age_s in ages.items() if age_s > limit_s}

    def calm(self) -> None:
        """No faults from here on; what is broken stays broken until it is repaired."""
        self.faults = NONE
        for worker in self.workers.values():
            worker.heard = True
            worker.refused.clear()


def play(seed: int, faults: Faults, seconds: int = 60) -> World:
    world = World(seed, faults)
    for _ in range(seconds * 2):
        for _ in range(world.random.choice((0, 0, 1, 1, 4))):
            world.fiddle()
        world.run(0.5)
    return world


@pytest.mark.parametrize("seed", range(40))
def test_under_faults_nothing_is_overfilled_and_afterwards_everything_runs(seed: int) -> None:
    world = play(seed, MANY)
    world.calm()
    world.run(120)
    assert world.placements > 0
    assert not world.unserved() or world.free() == 0, f"{world.unserved()} wait, {world.free()} slots free"
    assert world.slow_moves() == {}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    faults=st.builds(
        Faults,
        delay_s=st.sampled_from((0.001, 0.05, 1.0)),
        lost_answer=st.sampled_from((0.0, 0.3)),
        lost_command=st.sampled_from((0.0, 0.3)),
        lost_load=st.sampled_from((0.0, 0.5, 1.0)),
        lost_event=st.sampled_from((0.0, 0.5, 1.0)),
        doubled_event=st.sampled_from((0.0, 0.5)),
        store_down=st.sampled_from((0.0, 0.05)),
        death=st.sampled_from((0.0, 0.05)),
        silence=st.sampled_from((0.0, 0.05)),
        restart=st.sampled_from((0.0, 0.05)),
        pause=st.sampled_from((0.0, 0.05)),
        refusal=st.sampled_from((0.0, 0.1)),
        drain=st.sampled_from((0.0, 0.05)),
        failed_copy=st.sampled_from((0.0, 0.5)),
        slow_copy=st.sampled_from((0.0, 0.5)),
        stale_copy=st.sampled_from((0.0, 0.5)),
    ),
)
def test_any_mixture_of_faults(seed: int, faults: Faults) -> None:
    world = play(seed, faults, seconds=30)
    world.calm()
    world.run(120)
    assert not world.unserved() or world.free() == 0
    assert world.slow_moves() == {}


@pytest.mark.parametrize("seed", range(5))
def test_without_faults_the_store_never_has_to_refuse(seed: int) -> None:
    """Reservations alone keep a burst from overfilling a worker: the store's own check is never needed."""
    world = play(seed, NONE)
    world.run(5)
    assert world.no_capacity == 0
    assert not world.unserved() or world.free() == 0


def test_the_same_seed_gives_the_same_decisions() -> None:
    assert play(7, MANY).trace == play(7, MANY).trace
    assert play(7, MANY).trace != play(8, MANY).trace


@pytest.mark.parametrize("seed", range(5))
def test_when_nothing_changes_sessions_come_to_rest(seed: int) -> None:
    world = play(seed, MANY)
    world.calm()
    world.run(240)
    begun = len(world.moved)
    world.run(240)
    assert len(world.moved) == begun
    assert world.moving_since == {}


@pytest.mark.parametrize("seed", range(5))
def test_a_draining_worker_is_emptied_without_a_session_being_cut(seed: int) -> None:
    """Running and suspended sessions leave it with their state, so nobody is placed anew."""
    world = World(seed, NONE, workers=3)
    world.run(2)
    for _ in range(4):
        world.arrive()
        world.run(0.5)
    asleep = world.random.choice(list(world.rows.values()))
    world.write(asleep, phase=Phase.SUSPENDED, activity=Activity.PAUSED)
    world.run(5)
    drained = world.workers[world.rows[asleep.id].worker or ""]
    there = [row.id for row in world.rows.values() if row.worker == drained.id]
    placements = world.placements
    drained.phase = WorkerPhase.DRAINING
    world.run(120)
    assert drained.phase is WorkerPhase.GONE
    assert world.placements == placements
    assert {name for _, name in world.moved} >= set(there)
    assert world.rows[asleep.id].phase is Phase.SUSPENDED


@pytest.mark.parametrize("seed", range(5))
def test_lost_reports_kill_nobody(seed: int) -> None:
    """Every load report is lost, the scheduler is held up and restarted: no worker is declared gone."""
    world = play(seed, Faults(lost_load=1.0, pause=0.05, restart=0.02, store_down=0.02), seconds=120)
    assert len(world.workers) == 3
    assert all(worker.phase is WorkerPhase.READY for worker in world.workers.values())


def test_a_dead_worker_is_found_within_the_time_out_and_a_little() -> None:
    world = World(1, NONE)
    world.run(20)
    session = world.arrive()
    assert session is not None
    world.run(2)
    owner = world.rows[session].worker
    assert owner is not None
    world.workers[owner].alive = False
    died = world.now
    while world.unserved():
        world.run(0.25)
        assert world.now - died < world.policy.worker_timeout_s + 2.0
    assert world.rows[session].worker != owner
    assert world.rows[session].epoch == 2


def test_nobody_watches() -> None:
    world = World(1, NONE, policy=Policy(idle_after_s=10.0))
    world.run(2)
    watched, forgotten = world.arrive(), world.arrive()
    assert watched is not None
    assert forgotten is not None
    for _ in range(30):
        world.feed(Watched(watched, 1), world.generation)
        world.feed(Watched(forgotten, 0), world.generation)
        world.run(1)
    assert world.rows[watched].phase is Phase.ACTIVE
    assert world.rows[forgotten].phase is Phase.SUSPENDED
    assert world.rows[forgotten].activity is Activity.IDLE


def test_a_pause_of_the_scheduler_makes_nobody_idle() -> None:
    world = World(1, NONE, policy=Policy(idle_after_s=10.0))
    world.run(2)
    session = world.arrive()
    assert session is not None
    world.run(1)
    world.paused_until = world.now + 60
    world.run(60.5)
    world.feed(Watched(session, 1), world.generation)
    world.run(5)
    assert world.rows[session].phase is Phase.ACTIVE


def test_who_waits_longest_is_served_first() -> None:
    world = World(1, NONE, workers=1)
    [worker] = world.workers.values()
    worker.capacity = 2
    world.run(2)
    running = [world.arrive(), world.arrive()]
    world.run(2)
    waiting = []
    for _ in range(3):
        # More than fit, as after a worker's death.
        waiting.append(world.arrive(admit=True))
        world.run(0.5)
    for expected, ended in zip(waiting, [*running, waiting[0]], strict=True):
        assert expected is not None
        assert ended is not None
        assert world.rows[expected].phase is Phase.REQUESTED
        world.write(world.rows[ended], phase=Phase.TERMINATED)
        world.run(2)
        assert world.rows[expected].phase is Phase.ACTIVE
