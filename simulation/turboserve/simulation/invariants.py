"""The design's invariants, each with a name, checked at the events that can violate them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from turboserve.contracts.events import Event, SessionEvent, WorkerJoined, WorkerLeft
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.simulation.class_checks import ClassChecks
from turboserve.simulation.decision_checks import DecisionChecks
from turboserve.simulation.loan_checks import LoanChecks
from turboserve.simulation.log_checks import LogChecks, SimulatedViewer
from turboserve.simulation.names import INVARIANTS
from turboserve.simulation.role_checks import RoleChecks, RoleDeployment
from turboserve.simulation.runtime.rows.tables import Table
from turboserve.simulation.service import ServiceProcess
from turboserve.simulation.tenants import TenantChecks, demands
from turboserve.simulation.trace import EventTrace
from turboserve.simulation.virtual_worker import VirtualWorker
from turboserve.subjects import EVENT, WORKER_EVENT

MESSAGES = 20
ADMISSION_S = 1.0
"""Time in which an admission, from its count to its commit, ends nearly always, seconds."""
"""Maximum number of violations that get a message."""


class CheckedDeployment(RoleDeployment, Protocol):
    """The deployment as the checks use it. `World` has its methods."""

    trace: EventTrace
    capacity: dict[str, int]
    workers: dict[str, VirtualWorker]
    outside: dict[str, int]
    on_lent: Callable[[ServiceProcess, ServiceProcess, float], None]

    def records(self) -> Iterator[SessionRecord]: ...
    def decision_of(self, record: SessionRecord) -> str | None: ...
    def most_slots(self, ending: int = 0) -> int: ...
    def leaders(self) -> list[str]: ...


class Checker:
    """Watches one world. A violation is counted and noted, and the run continues."""

    def __init__(self, world: CheckedDeployment) -> None:
        self._world = world
        self.violations: Counter[str] = Counter()
        self.messages: list[str] = []
        self.gone: dict[str, float] = {}
        """Workers whose phase `gone` is committed, and when that was."""
        self.device_deaths: Counter[str] = Counter()
        """Session → number of devices that failed with it."""
        self.log = LogChecks(self)
        self.classes = ClassChecks(self, world)
        self.decisions = DecisionChecks(self, world, self.classes)
        self.roles = RoleChecks(self, world)
        self.tenants = TenantChecks(self, world)
        self.loans = LoanChecks(self, world)
        self.migrations = self.placements = 0
        self._committed: dict[str, deque[str]] = {}
        """Subject → ids of its committed events that the log has not accepted yet."""
        self._logged: set[str] = set()
        """Ids of events that the log has accepted."""
        self._numbers: Counter[str] = Counter()
        """Session → number of the newest event that the log has accepted."""
        self.note, self.result = world.trace.note, world.trace.result

    def fail(self, name: str, message: str) -> None:
        assert name in INVARIANTS, name
        self.violations[name] += 1
        line = f"{name}: {message}"
        self.note("VIOLATION", line)
        if len(self.messages) < MESSAGES:
            self.messages.append(f"{self._world.loop.time():.3f} s: {line}")

    def seed_of(self, session: str) -> int | None:
        entry = self._world.postgres.tables.sessions.rows.get(session)
        return None if entry is None else entry.record.seed

    def pinned(self, session: str) -> bool:
        entry = self._world.postgres.tables.sessions.rows.get(session)
        quality = None if entry is None else entry.record.quality
        return quality is not None and quality.pin

    # Rows

    def committed(self, table: Table[Any, Any], key: Any, before: Any, after: Any) -> None:
        """Check a committed row."""
        if table.name == "sessions" and after is not None:
            self._session(None if before is None else before.record, after.record)
        elif table.name == "workers" and after is not None:
            self._worker(None if before is None else before.record, after.record)
        elif table.name == "outbox" and before is None:
            self._committed.setdefault(after.subject, deque()).append(after.event_id)
        elif table.name == "outbox" and after is None and before.event_id not in self._logged:
            self.fail("events_complete", f"{before.event_id} of {before.subject} was never logged")

    def lost(self, table: Table[Any, Any], key: Any, after: Any, before: Any) -> None:
        """Check a commit that a crash of the database reverted."""
        if table.name == "sessions" and after is not None:
            if before is None or before.record.epoch != after.record.epoch:
                self.fail("epochs_increase", f"{key}: a crash lost epoch {after.record.epoch}")
            self.tenants.lost(after.record, None if before is None else before.record)
        elif table.name == "outbox" and before is None and after is not None:
            waiting = self._committed.get(after.subject, ())
            if after.event_id in waiting:
                waiting.remove(after.event_id)  # type: ignore[union-attr]

    def _session(self, before: SessionRecord | None, after: SessionRecord) -> None:
        self.note(
            f"row {after.id} v{after.version} {after.phase} {after.activity} e{after.epoch} {after.worker}"
            f" own={after.own_revision} next={after.next_chunk} target={after.target}"
        )
        self.tenants.committed(before, after)
        self.roles.placed(before, after)
        if before is not None:
            self._owner(before, after)
        else:
            self._admitted(after)
        if after.phase.holds_slot and (before is None or _slots(before) != _slots(after)):
            for worker in {after.worker, after.target} - {None}:
                self.classes.placed(after, str(worker))
                self._room(str(worker), self._world.scale.most_sessions)
            if after.target is not None and (before is None or before.target != after.target):
                # No migration puts a worker above K: only a placement is absorbed.
                self._room(after.target, self._world.capacity.get(after.target, 0))
        failed = after.phase is Phase.FAILED and (before is None or before.phase is not Phase.FAILED)
        if failed and not self._is_poisoned(before, after) and not self._is_complete(before, after):
            self.fail("converges_after_faults", f"{after.id} failed: {after.reason}")

    def _is_poisoned(self, before: SessionRecord | None, after: SessionRecord) -> bool:
        """Return whether enough devices failed with the session that the store may give it up."""
        owner = None if before is None else self._world.workers.get(str(before.worker))
        deaths = self.device_deaths[after.id] + (owner is not None and owner.device_lost)
        return str(after.reason).startswith("poisoned") and deaths >= self._world.scale.store().poison_workers

    def _is_complete(self, before: SessionRecord | None, after: SessionRecord) -> bool:
        """Return whether the session has all chunks that its device declares for it."""
        owner = None if before is None else self._world.workers.get(str(before.worker))
        chunks = None if owner is None else owner.profile.chunks_of.get(after.seed)
        last = self.log.of(after.id).last
        return chunks is not None and last is not None and last.index + 1 >= chunks

    def _admitted(self, record: SessionRecord) -> None:
        """Check an admission: the pool at its largest must have a slot for each session that must run.

        A worker may be declared gone between the store's count and its commit.
        """
        wanted = sum(map(demands, self._world.records()))
        counted_s = self._world.loop.time() - ADMISSION_S
        if self._world.scale.classes is not None:
            self.classes.admitted(record, [name for name, at in self.gone.items() if at >= counted_s])
            return
        slots = self._world.most_slots(sum(at >= counted_s for at in self.gone.values()))
        if wanted > slots:
            self.fail("capacity", f"{record.id} is admitted as number {wanted} of {slots} slots")

    def _owner(self, before: SessionRecord, after: SessionRecord) -> None:
        if after.version < before.version:
            self.fail("epochs_increase", f"{after.id} has a version below {before.version}")
        changed = after.worker != before.worker
        placed = after.phase is Phase.ACTIVE and before.phase not in (Phase.ACTIVE, Phase.MIGRATING)
        if after.epoch < before.epoch or after.epoch > before.epoch + 1:
            self.fail("epochs_increase", f"{after.id}: {before.epoch} → {after.epoch}")
        elif (changed or placed) and after.epoch != before.epoch + 1:
            self.fail("epochs_increase", f"{after.id}: another owner under epoch {after.epoch}")
        if after.epoch == before.epoch + 1:
            kind = self._world.decision_of(after)
            self.placements += kind in ("place", "resume", "recover")
            if kind == "migrated":
                self._flipped(before, after)

    def _flipped(self, before: SessionRecord, after: SessionRecord) -> None:
        """Check a committed migration: the target must have the state that ends the log."""
        self.migrations += 1
        self.decisions.migrated(after)
        worker = self._world.worker(after.worker)
        if worker is None:
            return
        source = self._world.workers[str(before.worker)]
        made, runs = source.weights.get(after.model), worker.weights.get(after.model)
        if made != runs:
            self.fail("verified_before_flip", f"{after.id} migrates from {made} to {runs}")
        log = self.log.of(after.id)
        state = worker.state(after.id)
        if state is None:
            self.fail(
                "verified_before_flip", f"{after.id} migrates to {after.worker}, which does not hold it"
            )
            return
        log.migrated = (after.epoch, state.number)
        # A source that took over from itself and has made no chunk yet may have begun without its context.
        other = (
            log.last is not None
            and log.last.epoch == before.epoch
            and log.last.contents.number != state.number
        )
        next_chunk = 0 if log.last is None else log.last.index + 1
        if (state.next_chunk != next_chunk and not log.fresh) or other:
            self.fail(
                "verified_before_flip",
                f"{after.id} migrates with {state}, which is not the state at the end of the log",
            )

    def _room(self, worker: str, capacity: int) -> None:
        if self._world.scale.classes is not None:
            return
        used = self._world.slots_used(worker)
        if worker in self._world.capacity and used > capacity:
            self.fail("capacity", f"{worker} has {used} assigned of {capacity}")

    def _worker(self, before: WorkerRecord | None, after: WorkerRecord) -> None:
        if after.phase is not WorkerPhase.GONE or (before is not None and before.phase is WorkerPhase.GONE):
            return
        # From now on its sessions may be assigned to other workers.
        self.note("gone", after.id)
        self.gone[after.id] = self._world.loop.time()
        worker = self._world.worker(after.id)
        if worker is not None and worker.generating:
            self.fail("one_executor", f"{after.id} is declared dead while its lease is valid")
        if self._world.workers[after.id].device_lost:
            self.device_deaths.update(row.id for row in self._world.records() if row.worker == after.id)

    def event_logged(self, event: Event) -> None:
        """Check an event that the event log has accepted."""
        subject = _subject(event)
        self.note("event", subject, type(event).__name__)
        if event.id not in self._logged and not isinstance(event, WorkerJoined | WorkerLeft):
            self._numbered(event)
        self._logged.add(event.id)
        waiting = self._committed.get(subject)
        if not waiting:
            # A repeat of an event from before a crash of the database, or from before a log was lost.
            return
        if waiting[0] == event.id:
            waiting.popleft()
        elif event.id in waiting:
            self.fail("events_complete", f"{subject}: {event.id} comes before {waiting[0]}")
            while waiting.popleft() != event.id:
                pass

    def _numbered(self, event: SessionEvent) -> None:
        """Check the number of an event that the log accepts for the first time."""
        session, number = event.record.id, event.record.event_sequence
        due = self._numbers[session] + 1
        if number != due:
            self.fail("events_numbered", f"{session}: {type(event).__name__} is {number} where {due} is due")
        self._numbers[session] = max(number, due - 1)

    # Workers

    def begins_chunk(self, worker: str, session: str, model: str) -> None:
        """Check that the worker whose engine begins a chunk is not declared gone. `model`: the engine's."""
        self.classes.begins_chunk(worker, session, model)
        if worker in self.gone:
            self.fail("one_executor", f"{worker} generates {session} after it was declared dead")

    # The log and viewers

    def delivered(self, viewer: SimulatedViewer, index: int, fragment: bytes) -> None:
        """Check a chunk that a viewer received."""
        self.log.delivered(viewer, index, fragment)
        row = self._world.postgres.tables.sessions.rows.get(viewer.session)
        if row is not None and row.record.tenant != viewer.tenant:
            self.fail("tenants_apart", f"{viewer.tenant} watches {viewer.session}")

    def unlogged(self) -> str | None:
        """Describe committed events that the log does not have; None if there are none."""
        for subject, waiting in self._committed.items():
            if waiting:
                return f"{len(waiting)} events of {subject} are not in the log"
        return None


def _slots(record: SessionRecord) -> tuple[bool, str | None, str | None]:
    """Return what determines whose slots the session takes."""
    return record.phase.holds_slot, record.worker, record.target


def _subject(event: Event) -> str:
    if isinstance(event, WorkerJoined | WorkerLeft):
        return WORKER_EVENT.of(event.worker.id)
    return EVENT.of(event.record.id)
