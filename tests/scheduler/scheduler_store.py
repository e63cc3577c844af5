"""The state store as the scheduler meets it: rows, and the real store's rules about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from virtual_world import VirtualWorld

from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import MoveStage, WorkerPhase, WorkerRecord
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
    Place,
    ReadSession,
    Refused,
    SessionChanged,
    SuspendIdle,
    WorkerChanged,
    WorkersListed,
)

MODEL = "quiet"
WALL = 1_700_000_000.0


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


class Store(VirtualWorld, ABC):
    """Compare-and-set on the version, capacity by rows. Checks the rows after every change."""

    def __init__(self, seed: int, faults: Faults) -> None:
        super().__init__(seed)
        self.faults = faults
        self.rows: dict[str, SessionRecord] = {}
        self.workers: dict[str, Worker] = {}
        self.no_capacity = 0
        self.placements = 0
        self.copies: dict[tuple[str, int], MoveStage] = {}
        """Session and move → what its target has made of it."""
        self.moved: list[tuple[float, str]] = []
        """When which session's move was committed."""
        self.moving_since: dict[str, float] = {}

    @abstractmethod
    def publish(self, event: Event) -> None:
        """Tell the scheduler, by way of the event log."""

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

    def join(self) -> None:
        worker = Worker(f"wrk_{next(self.names)}", self.random.choice((2, 3, 4)), renewed_at=self.now)
        self.workers[worker.id] = worker
        self.publish(WorkerChanged(worker.record()))
