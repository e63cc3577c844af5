"""The surroundings of the scheduler's core, on a virtual clock, under faults.

- The store is the state store's own service on servers in memory.
- Messages are delayed, lost, doubled and reordered.
- Workers die, fall silent, drain and join.
- Sessions migrate, and their copies take long or fail.
- The scheduler is restarted and delayed.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.scheduler.scheduler_faults import NONE, Faults
from tests.scheduler.scheduler_rows import RowsWorld
from tests.scheduler.scheduler_workers import MODEL, Worker
from turboserve.baselines.least_loaded import LeastLoaded
from turboserve.contracts.fidelity import SessionSlack, Tier
from turboserve.contracts.loans import LoanRole, WorkerLoan
from turboserve.contracts.requests import CreateSession
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import (
    HeldSession,
    MigrationReport,
    MigrationStage,
    SessionRefusal,
    WorkerPhase,
)
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import (
    Answered,
    BeginMigration,
    Command,
    CommitMigration,
    DeclareGone,
    Event,
    LoadReported,
    OfSession,
    Place,
    RecordDecision,
    Refused,
    Reply,
    SendFeedback,
    Tick,
)
from turboserve.scheduler.placement import MinMaxRebalancer
from turboserve.scheduler.policy import Policy

DEADLINE_S = 3.0


class World(RowsWorld):
    """Store, workers, users and network; `now` is the virtual time."""

    reports_slack = False
    """Whether workers report a slack for each session that they run."""
    reports_quality = False
    """Whether workers report a quality debt, a deficit, K_floor and loans."""

    def __init__(self, seed: int, faults: Faults, workers: int = 3, policy: Policy | None = None) -> None:
        super().__init__(seed, faults)
        self.policy = policy or Policy(idle_after_s=1e9)
        self.paused_until = 0.0
        self._outstanding: set[str] = set()
        for _ in range(workers):
            self.join()
        self.core = self.scheduler()
        self.at(0.0, self.tick)
        self.at(1.0, self.beat)

    def delay(self) -> float:
        return self.delay_around(self.faults.delay_s)

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
        """Check the invariants of a command when it is given."""
        if isinstance(command, SendFeedback):
            # A request that was given up, or made in an earlier incarnation, may take effect after its slot
            # was promised to another session. Both are then counted until the store has refused one of them.
            in_time = not (self.faults.lost_answer or self.faults.restart)
            assert command.feedback.rho_max <= 1.0 or not in_time
            return
        if isinstance(command, RecordDecision):
            return
        if isinstance(command, Place):
            worker = self.core.view.workers[command.worker]
            assert worker.load <= worker.capacity, f"{worker.id} overfilled"
            assert command.session in worker.reserved
        if isinstance(command, BeginMigration):
            worker = self.core.view.workers[command.worker]
            assert worker.load <= worker.capacity, f"{worker.id} overfilled"
            assert command.decision.reason
        if isinstance(command, CommitMigration):
            stage, _ = self.copies.get((command.session, command.migration), (None, 0))
            assert stage is MigrationStage.VERIFIED, "not verified"
        if isinstance(command, OfSession):
            assert command.session not in self._outstanding, "two commands for one session"
            self._outstanding.add(command.session)
        if isinstance(command, DeclareGone) and command.worker in self.workers:
            silent_s = self.now - self.workers[command.worker].renewed_at
            assert silent_s >= self.policy.lease_s, f"taken over within the lease: {silent_s}"
        self.trace.append(f"{self.now:.3f} {command}")

    def carry_out(self, command: Command) -> None:
        if isinstance(command, RecordDecision | SendFeedback | Reply):
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
        # Some requests are so late that they take effect after their sender has given them up.
        late_s = 2 * DEADLINE_S if lost and self.chance(0.5) else 0.0
        if late_s:
            self.at(DEADLINE_S, lambda: failed(Refused.UNKNOWN))
            self.at(late_s, lambda: self.serve(command))
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

    # Workers

    def beat(self) -> None:
        """Simulate one second: workers renew and report, and the faults of this second occur."""
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
                self.store.renew(worker.load(WorkerPhase.GONE))
                continue
            if self.chance(self.faults.silence):
                worker.heard = not worker.heard
            if self.store_up and self.store.renew(worker.load()):
                worker.renewed_at = self.now
            if worker.heard and not self.chance(self.faults.lost_load):
                self.at(self.delay(), self._report(worker))
        if self.chance(self.faults.restart):
            self.restart()
        if self.chance(self.faults.pause):
            self.paused_until = self.now + self.random.uniform(1, 40)
        if self.chance(self.faults.store_down) and self.store_up:
            self.lose_store(0.5, 10.0)

    def named(self, worker: str) -> bool:
        """Return whether a session is on the worker or migrating to it."""
        return any(worker in (row.worker, row.target) and not row.phase.ended for row in self.rows.values())

    def _report(self, worker: Worker) -> Callable[[], None]:
        mine = [r for r in self.rows.values() if r.worker == worker.id and r.phase.holds_slot]
        coming = [r for r in self.rows.values() if r.target == worker.id]
        worker.refused |= {(r.id, r.epoch) for r in mine if self.chance(self.faults.refusal)}
        nothing = (MigrationStage.COPYING, 0)
        copies = {r.id: self.copies.get((r.id, r.migration or 0), nothing) for r in coming}
        report = worker.load(
            None,
            **(self._quality(worker) if self.reports_quality else {}),
            sessions=tuple(self._held(r) for r in mine) if self.reports_slack else (),
            chunk_latency_s={1: 0.3, 2: 0.6} if self.reports_slack else {},
            migrations=tuple(
                MigrationReport(
                    session=r.id,
                    migration=r.migration or 0,
                    stage=copies[r.id][0],
                    next_chunk=copies[r.id][1],
                    bytes_copied=1_000,
                    seconds=0.5,
                )
                for r in coming
            ),
            refusals=tuple(
                SessionRefusal(session=r.id, epoch=r.epoch, reason="full")
                for r in mine
                if (r.id, r.epoch) in worker.refused
            ),
        )
        return lambda: self.feed(LoadReported(report), self.generation)

    def _quality(self, worker: Worker) -> dict[str, object]:
        """Draw what a report says of lower fidelity. The draws are independent of all others of the seed."""
        chance = Random(f"{worker.id} {self.now}")
        return {
            "floor_capacity": chance.choice((None, worker.capacity, 2 * worker.capacity)),
            "quality_debt": chance.choice((0.0, 0.1, 0.25, 1.0)),
            "deficit": chance.choice((0.0, 0.5, 3.0)),
            "loan": chance.choice((None, *(WorkerLoan(role=role, peer="other") for role in LoanRole))),
        }

    def _held(self, row: SessionRecord) -> HeldSession:
        chance = Random(f"{row.id} {self.now}")
        slack_s = chance.choice((0.0, 0.1, 0.3, 1.0, 3.0))
        slack = SessionSlack(slack_s=slack_s, credit_s=slack_s - 0.4, tier=Tier.NORMAL)
        return HeldSession(session=row.id, epoch=row.epoch, next_chunk=0, slack=slack)

    # Users

    def arrive(self, admit: bool = False) -> str | None:
        """Create a session, if the store admits it or `admit` is set."""
        request = CreateSession(
            id=f"ses_{next(self.names)}", tenant="t", model=MODEL, prompt="a red circle", seed=1
        )
        return request.id if self.store.create(request, admit=admit) else None

    def fiddle(self) -> None:
        """Do one random user action."""
        live = [row for row in self.rows.values() if not row.phase.ended]
        deed = self.random.random()
        if deed < 0.5 or not live:
            self.arrive()
            return
        row = self.random.choice(live)
        if deed < 0.7:
            self.store.end(row.id)
        elif deed < 0.85 and row.phase.holds_slot:
            self.store.pause(row.id)
        elif row.phase is Phase.SUSPENDED and row.activity is not Activity.WATCHING:
            self.store.resume(row.id)

    @staticmethod
    def wants_slot(row: SessionRecord) -> bool:
        return not row.phase.ended and row.activity is Activity.WATCHING

    def unserved(self) -> list[SessionRecord]:
        """Return the sessions that should run and do not."""
        return [
            row
            for row in self.rows.values()
            if self.wants_slot(row) and not (row.phase.holds_slot and self.workers[row.worker or ""].alive)
        ]

    def free(self) -> int:
        ready = (w for w in self.workers.values() if w.alive and w.phase is WorkerPhase.READY)
        return sum(w.capacity - self.used(w.id) for w in ready)

    def slow_migrations(self) -> dict[str, float]:
        """Return the sessions that migrate for longer than allowed, with the duration."""
        limit_s = self.policy.migration_timeout_s + 2 * self.policy.resync_s
        ages = {name: self.now - since for name, since in self.migrating_since.items()}
        return {name: age_s for name, age_s in ages.items() if age_s > limit_s}

    def calm(self) -> None:
        """End all faults. Broken parts stay broken until they are repaired."""
        self.faults = NONE
        for worker in self.workers.values():
            worker.heard = True
            worker.refused.clear()


def run_scenario(seed: int, faults: Faults, seconds: int = 60) -> World:
    world = World(seed, faults)
    for _ in range(seconds * 2):
        for _ in range(world.random.choice((0, 0, 1, 1, 4))):
            world.fiddle()
        world.run(0.5)
    return world
