"""The modeled workers, the sessions on them, and their cost."""

from __future__ import annotations

import itertools

from turboserve.autoscaler.control.events import SessionChange
from turboserve.contracts.pool import LoadFeedback
from turboserve.experiments.autoscale.load_feedback import MODEL, load_feedback
from turboserve.experiments.autoscale.outcome import DebtWindow, ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, Resume
from turboserve.experiments.autoscale.running import RunningSessions
from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.interface import Assigner, Rebalancer
from turboserve.scheduler.placement.minmax import MinMax
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.placement.rebalance import MinMaxRebalancer
from turboserve.scheduler.placement.types import Demand, Migration, MigrationKind, SessionState, WorkerState
from turboserve.static_frozen import with_fields

STATE_BYTES = 0
"""Bytes of a session's state. A migration costs the plant's `migration_s`, which is α of the links."""
REST_S = 2.0
"""Time after a migration in which the session is not migrated again for balance."""


def holder_with_room(cluster: Cluster, holder: str | None) -> PoolEntry | None:
    """Return the worker that holds a session's state, if it takes the session back; else None."""
    entry = cluster.entries.get(holder or "")
    return None if entry is None or not entry.candidate or entry.held >= entry.slots else entry


class Fleet:
    """Workers that start, serve, drain and end. `cluster`: what the scheduler knows; `running`: what runs."""

    def __init__(
        self,
        plant: Plant,
        rebalancer: Rebalancer | None = None,
        assigner: Assigner | None = None,
        resume: Resume = Resume.BY_POLICY,
    ) -> None:
        self.plant = plant
        self._resume = resume
        self.cluster = Cluster()
        self.outcome = ScalingOutcome()
        self.target = 0
        self._placement: Assigner = assigner or MinMax()
        self._rebalancer: Rebalancer = rebalancer or MinMaxRebalancer()
        self._names = itertools.count()
        self._starting: dict[str, float] = {}
        """Worker → the time at which it will be ready."""
        self._serving: dict[str, WorkerState] = {}
        """Ready or draining workers, in order of start."""
        self._waiting: dict[str, float] = {}
        """Session → the time since which it has been active without a slot, in order."""
        self._now = 0.0
        held = range(1, plant.floor_capacity + 1)
        self._lowered = [0, *(plant.lowered(n) for n in held)]
        self._latency = [0.0, *(plant.chunk_s(n, self._lowered[n]) for n in held)]
        self.running = RunningSessions(self._latency, self._lowered)
        self._absorbs = False
        self._debt = DebtWindow()

    # Time

    def advance(self, now: float) -> None:
        """Add the cost of the time since the last event."""
        elapsed, self._now = now - self._now, now
        if elapsed <= 0:
            return
        outcome = self.outcome
        before = outcome.session_s, outcome.lowered_s
        outcome.cost_s += elapsed * self.paid
        outcome.wait_s += elapsed * len(self._waiting)
        self.running.add(elapsed, outcome)
        outcome.worst_s = max(outcome.worst_s, outcome.worst_served_s)
        self._debt.add(now, outcome.session_s - before[0], outcome.lowered_s - before[1])

    def finish(self, now: float) -> None:
        """End the run: sessions that still wait have waited until now."""
        self.advance(now)
        for since in self._waiting.values():
            self._first_chunk(self._latency[1], now - since)

    def overdue(self, now: float) -> bool:
        """Return whether a session has waited so long that its first chunk will be late."""
        lone_s = self._latency[1]
        return any(now - since + lone_s > self.plant.target_s for since in self._waiting.values())

    @property
    def paid(self) -> int:
        """Workers that cost: starting, serving, draining."""
        return len(self._starting) + len(self._serving)

    @property
    def starting(self) -> int:
        return len(self._starting)

    # Sessions

    def waits(self, session: str) -> bool:
        """Return whether the session waits for a slot."""
        return session in self._waiting

    def on_session_change(self, session: str, kind: SessionChange, now: float) -> None:
        """Apply a session's change, of which the scheduler learns now."""
        match kind:
            case SessionChange.ARRIVAL | SessionChange.ACTIVATION:
                self.outcome.placed += 1
                self._waiting[session] = now
                if kind is SessionChange.ARRIVAL:
                    self.cluster.put_session(SessionState(session, MODEL, state_bytes=STATE_BYTES))
            case SessionChange.IDLING:
                self.running.stop(session)
                since = self._waiting.pop(session, None)
                state = self.cluster.sessions[session]
                if since is not None:
                    self._gave_up(now - since)
                self.cluster.put_session(
                    with_fields(state, suspended=state.worker is not None, target=None, reserved=None)
                )
            case SessionChange.DEPARTURE:
                self.running.stop(session)
                since = self._waiting.pop(session, None)
                if since is not None:
                    self._gave_up(now - since)
                self.cluster.drop_session(session)
        self._release_empty()

    def place(self, now: float) -> None:
        """Assign waiting sessions to workers, as far as there is room."""
        if not self._waiting:
            return
        sessions = self.cluster.sessions
        # The same order as in the scheduler's core: the longest wait first, then the earliest creation.
        names = sorted(self._waiting, key=lambda name: (self._waiting[name], name))
        if self._resume is Resume.RETURNS:
            names = [name for name in names if not self._returned(name, now)]
        knows = self._resume is Resume.BY_POLICY
        holders = {name: sessions[name].worker if knows else None for name in names}
        demands = [Demand(name, MODEL, "place", holder=holders[name]) for name in names]
        for choice in self._placement.assign(self.cluster, demands):
            if choice.worker is not None:
                self._put(choice.session, choice.worker, now)

    def _returned(self, session: str, now: float) -> bool:
        """Assign a session to the worker that holds its state. Returns whether there is room."""
        entry = holder_with_room(self.cluster, self.cluster.sessions[session].worker)
        if entry is None:
            return False
        self._put(session, entry.id, now)
        return True

    def _put(self, session: str, worker: str, now: float) -> None:
        waited_s, state = now - self._waiting.pop(session), self.cluster.sessions[session]
        self.cluster.put_session(with_fields(state, worker=worker, suspended=False, target=None))
        if waited_s > 0:
            self.outcome.waited += 1
        self.running.start(session, worker)
        self._first_chunk(self._latency[self.running.on(worker)], waited_s)

    def rebalance(self, now: float) -> list[Migration]:
        """Begin the migrations that the scheduler's rebalancer proposes."""
        migrations = self._rebalancer.propose(self.cluster, now)
        for migration in migrations:
            self.cluster.put_session(
                with_fields(self.cluster.sessions[migration.session], target=migration.target)
            )
        return migrations

    def commit(self, migration: Migration, now: float) -> None:
        """Commit a migration, because its state has arrived."""
        state = self.cluster.sessions.get(migration.session)
        if state is None or state.target != migration.target or state.worker != migration.source:
            return
        self.outcome.migrated_at.append(now)
        rests = now + REST_S if migration.kind is not MigrationKind.DRAIN else state.rests_until
        self.cluster.put_session(with_fields(state, worker=migration.target, target=None, rests_until=rests))
        if not state.suspended:
            self.running.stop(migration.session)
            self.running.start(migration.session, migration.target)
            self._chunk(self._migrated_s(self.running.on(migration.target)))
        self._release_empty()

    def _migrated_s(self, sessions: int) -> float:
        """Return the seconds of the first chunk after a migration. A worker that absorbs lowers it, too."""
        plant, lowered = self.plant, self._lowered[sessions]
        if self._absorbs:
            lowered = plant.lowered(sessions, plant.migration_s)
            chunk_s = plant.chunk_s(sessions, lowered)
            self.outcome.lowered_s += (lowered - self._lowered[sessions]) * chunk_s
            return plant.migration_s + chunk_s
        return plant.migration_s + self._latency[sessions]

    def _gave_up(self, waited_s: float) -> None:
        self.outcome.waited += 1
        self._first_chunk(self._latency[1], waited_s)

    def _first_chunk(self, made_s: float, waited_s: float) -> None:
        self.outcome.late_first += waited_s + made_s > self.plant.target_s
        self._chunk(made_s, waited_s)

    def _chunk(self, made_s: float, waited_s: float = 0.0) -> None:
        """Record a chunk's latency, including the wait before it.

        The chunk is the first of an activation, or the next of a migrated session.
        """
        latency_s, outcome = waited_s + made_s, self.outcome
        outcome.worst_s = max(outcome.worst_s, latency_s)
        if latency_s > self.plant.target_s:
            outcome.late += 1
            outcome.late_since.append(self._now - waited_s)

    # Workers

    def resize(self, target: int, now: float, ready: bool = False) -> list[tuple[float, str]]:
        """Change the target.

        Returns (ready time, worker) for each new worker; with `ready`, they serve at once.
        """
        self.target = target
        surplus = len(self._starting) + len(self._wanted()) - target
        if surplus > 0:
            self._shrink(surplus)
        added = []
        for _ in range(-surplus):
            name = f"w{next(self._names):04d}"
            self._starting[name] = now + self.plant.start_up_s
            if ready:
                self.ready(name)
            else:
                added.append((self._starting[name], name))
        self._note(now)
        return added

    def ready(self, worker: str) -> None:
        """Make a started worker ready. Does nothing if the start was canceled before."""
        if self._starting.pop(worker, None) is None:
            return
        plant = self.plant
        state = WorkerState(
            id=worker,
            model=MODEL,
            capacity=plant.capacity,
            floor_capacity=plant.floor_capacity,
            absorbs=self._absorbs,
            chunk_latency_s=plant.latency_s,
        )
        self._serving[worker] = state
        self.cluster.put_worker(state)

    def absorb(self, on: bool) -> bool:
        """Let workers hold up to K_floor sessions, or only K. Returns whether only now they may."""
        if on == self._absorbs:
            return False
        self._absorbs = on
        for worker, state in self._serving.items():
            self._serving[worker] = with_fields(state, absorbs=on)
            self.cluster.put_worker(self._serving[worker])
        return on

    def feedback(self, now: float) -> LoadFeedback:
        """Return the scheduler's feedback."""
        debt = self._debt.share(now)
        self.outcome.debt_peak = max(self.outcome.debt_peak, debt)
        floor_slots, entries = self.plant.floor_capacity, self.cluster.entries
        return load_feedback(self._serving, entries, len(self._waiting), debt, floor_slots, now)

    def _wanted(self) -> list[str]:
        return [worker for worker, state in self._serving.items() if not state.draining]

    def _shrink(self, surplus: int) -> None:
        for worker in sorted(self._starting, key=lambda w: -self._starting[w])[:surplus]:
            # The pool first gives up workers that do not serve yet (`autoscaler.pool_members.fit`).
            del self._starting[worker]
            surplus -= 1
        entries = self.cluster.entries
        least = sorted(self._wanted(), key=lambda w: (entries[w].held + len(entries[w].suspended), w))
        for worker in least[:surplus]:
            self._serving[worker] = with_fields(self._serving[worker], draining=True)
            self.cluster.put_worker(self._serving[worker])
        self._release_empty()

    def _release_empty(self) -> None:
        if not (draining := self.cluster.pool(MODEL).draining):
            return
        for worker in [name for name in self._serving if name in draining]:
            entry = self.cluster.entries[worker]
            if not (entry.here or entry.coming or entry.suspended):
                del self._serving[worker]
                self.cluster.drop_worker(worker)
                self._note(self._now)

    def _note(self, now: float) -> None:
        self.outcome.sizes.append((now, self.paid))
