"""The scheduler's view: what it knows of workers and sessions. The view makes no decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from cachetools import FIFOCache

from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord
from turboserve.scheduler.absorption import Absorption
from turboserve.scheduler.session_view import (
    Migrating,
    MigratingSuspended,
    Placing,
    SessionView,
    Share,
    TenantSlots,
    slack_reported,
    slot_on,
)
from turboserve.scheduler.worker_view import Serving, WorkerView

REMEMBERED = 10_000
"""Number of ids of ended sessions, and of gone workers, that are kept against late messages."""


class View:
    """All workers and sessions, and the sessions of each worker.

    A session's row replaces only an older version. An ended session and a gone worker do not return.
    """

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self.sessions: dict[str, SessionView] = {}
        self.wanting: set[str] = set()
        """Sessions that need a worker or whose row must be read."""
        self.beginning: set[str] = set()
        """Sessions with a migration that is decided and not confirmed yet."""
        self.migrating: set[str] = set()
        """Sessions whose rows name a migration target."""
        self.ended_migrations: list[tuple[SessionView, SessionRecord]] = []
        """Sessions whose migration has ended, with the row before the end. `Migrations.drive` empties it."""
        self._slots = TenantSlots()
        self.state_bytes: dict[str, int] = {}
        """Model → bytes that the last migration of one of its sessions transferred."""
        self.changed_workers: set[str] = set()
        """Workers added, removed or changed since the cluster projection last read this set."""
        self.changed_sessions: set[str] = set()
        self._absorption = Absorption()
        self.changed_slacks: set[str] = set()
        """Sessions with a new slack since the cluster projection last read this set."""
        self._stamp = 0
        self._gone: FIFOCache[str, None] = FIFOCache(REMEMBERED)
        self._ended: FIFOCache[str, None] = FIFOCache(REMEMBERED)

    def stamp(self) -> int:
        """Return a number larger than all before it. Stamps order rows and answers against requests."""
        self._stamp += 1
        return self._stamp

    # Workers

    def is_gone(self, worker: str) -> bool:
        return worker in self._gone

    def knows(self, worker: str) -> bool:
        """Whether the view has the worker, or knows that the worker is gone."""
        return worker in self.workers or worker in self._gone

    def put_worker(self, record: WorkerRecord, listened: float) -> WorkerView | None:
        """Apply a worker's row; returns the worker's view, or None if the worker is gone."""
        if record.phase is WorkerPhase.GONE:
            self.drop_worker(record.id)
            return None
        if self.is_gone(record.id):
            return None
        worker = self.workers.get(record.id)
        if worker is None:
            worker = WorkerView(
                id=record.id,
                model=record.model,
                capacity=record.capacity,
                process=Serving(record.phase),
                heard_at=listened,
                looked_at=listened,
                renewed_at=record.renewed_at,
                renewal_seen_at=listened,
                known_since=self.stamp(),
                changed=partial(self.changed_workers.add, record.id),
            )
            self.workers[record.id] = worker
            self.changed_workers.add(record.id)
            for session in self.sessions.values():
                if record.id in (session.record.worker, session.record.target):
                    self._count(session.record)
                    self.settle(session)
        speed = worker.speed
        worker.reported(record.phase, record.started_at)
        worker.capacity = record.capacity
        worker.host, worker.provides_state = record.host, bool(record.transfer)
        worker.declares(record.weights_digest, record)
        worker.measured(record.chunk_latency_s)
        if worker.speed != speed:
            self.changed_outside(worker.id)
        return worker

    def put_report(self, report: LoadReport, heard_at: float, now: float) -> WorkerView | None:
        """Apply a worker's load report; returns the worker's view, or None if the worker is unknown.

        `heard_at` is listening time; `now` is monotonic time, from which slacks are extrapolated.
        """
        worker = self.workers.get(report.worker)
        if worker is None:
            return None
        worker.heard_at = heard_at
        speed = worker.speed
        worker.reported(report.phase, report.started_at)
        worker.capacity = report.capacity
        worker.host, worker.provides_state = report.host, bool(report.transfer)
        # A late report from the loading phase has no digest and must not remove the known one.
        worker.declares(report.weights_digest or worker.weights_digest, report)
        worker.arrivals = {migration.session: migration for migration in report.migrations}
        worker.measured(report.chunk_latency_s)
        worker.reported_limits(report)
        if worker.speed != speed:
            self.changed_outside(worker.id)
        for held in report.sessions:
            session = self.sessions.get(held.session)
            if session is None or (session.record.worker, session.record.epoch) != (worker.id, held.epoch):
                continue
            if held.slack is not None or session.slack is not None:
                session.slack = None if held.slack is None else slack_reported(held.slack, now)
                self.changed_slacks.add(session.id)
            if held.slack is not None and session.acted(held.epoch, held.control_seq, held.slack.playing):
                self.changed_outside(worker.id)
        return worker

    def changed_outside(self, *workers: str | None) -> None:
        """Note that something changed on the workers that the rebalancer did not cause."""
        for worker in workers:
            if worker in self.workers:
                self.workers[worker].changed_outside = self.stamp()

    def put_pool(self, pool: str, model: str, absorbs: bool, listened: float) -> None:
        """Apply whether the workers of a pool's model may hold more than K sessions."""
        before = self.absorbs(model, listened)
        self._absorption.put(pool, model, absorbs, listened)
        if self.absorbs(model, listened) != before:
            self.changed_workers.update(w.id for w in self.workers.values() if w.model == model)

    def absorbs(self, model: str, listened: float) -> bool:
        return self._absorption.of(model, listened)

    def drop_worker(self, worker: str) -> None:
        """Remove a gone worker for good. Its sessions that need another worker join `wanting`."""
        self._gone[worker] = None
        if (view := self.workers.pop(worker, None)) is None:
            return
        self.changed_workers.add(worker)
        for session in [*view.used, *view.holding, *view.reserved, *view.incoming]:
            self.settle(self.sessions.get(session))

    # Sessions

    def put_session(self, record: SessionRecord, listened: float) -> SessionView | None:
        """Apply a session's row if it is newer than the known one.

        Returns the session's view, or None if the session has ended.
        """
        if record.id in self._ended:
            return None
        session, touched = self.sessions.get(record.id), self.stamp()
        if session is not None and record.unwatched_s is not None:
            session.watched_at = max(session.watched_at, listened - record.unwatched_s)
        if session is not None and record.version <= session.record.version:
            if record.version == session.record.version:
                session.touched = touched
            return session
        if record.phase.ended:
            self.drop_session(record.id)
            return None
        if session is None:
            changed = partial(self.changed_sessions.add, record.id)
            session = SessionView(record, touched, listened, changed=changed)
            self.sessions[record.id] = session
            self.changed_sessions.add(record.id)
            self._count(record)
            self._slots.add(record)
            self.changed_outside(slot_on(record))
            return session
        before, session.record = session.record, record
        session.touched = touched
        self._slots.remove(before)
        self._slots.add(record)
        self._uncount(before)
        self._count(record)
        if before.migration is not None and before.migration != record.migration:
            self.ended_migrations.append((session, before))
        elif slot_on(before) != slot_on(record):
            self.changed_outside(slot_on(before), slot_on(record))
        if record.epoch != before.epoch:
            session.refused_epoch = None
        became_active = record.phase is Phase.ACTIVE and not before.phase.holds_slot
        watched = record.activity is Activity.WATCHING and before.activity is not Activity.WATCHING
        if became_active or watched:
            session.watched_at = listened
        return session

    def drop_session(self, session: str) -> None:
        """Remove an ended session for good."""
        self._ended[session] = None
        self.forget_session(session)

    def forget_session(self, session: str) -> None:
        """Remove a session that the store no longer has. A later row may add it again."""
        view = self.sessions.pop(session, None)
        self.wanting.discard(session)
        if view is not None:
            self.changed_sessions.add(session)
            self.release(view)
            self._uncount(view.record)
            self._slots.remove(view.record)
            self.changed_outside(slot_on(view.record))

    def reserve(self, session: SessionView, worker: str) -> None:
        """Note a decided placement on `worker`, with a slot reserved there."""
        self.release(session)
        session.pending = Placing(worker)
        self.workers[worker].reserved.add(session.id)

    def begin_migration(self, session: SessionView, target: str) -> None:
        """Note a decided migration to `target`. A session that holds a slot gets one reserved there."""
        self.release(session)
        if session.record.phase.holds_slot:
            session.pending = Migrating(target)
            self.workers[target].reserved.add(session.id)
        else:
            session.pending = MigratingSuspended(target)
        self.beginning.add(session.id)

    def release(self, session: SessionView) -> None:
        """Drop the session's unconfirmed decision, if there is one, with its reservation."""
        if session.pending is None:
            return
        worker = self.workers.get(session.reserved_on or "")
        if worker is not None:
            worker.reserved.discard(session.id)
        session.pending = None
        self.beginning.discard(session.id)

    def slots_besides(self, asking: Collection[SessionView]) -> Mapping[Share, int]:
        """Sum the costs of slots held by or reserved for sessions besides `asking`, by model and tenant.

        A session that lost its worker and waits for another holds no slot.
        """
        slots = self._slots.counts()
        for name in self.wanting:
            session = self.sessions[name]
            lost = session.record.phase.holds_slot and self.kind(session) is not None
            slots[session.share] += ((session.reserved_on is not None) - lost) * session.record.slot_cost
        for session in asking:
            slots[session.share] -= (session.reserved_on is not None) * session.record.slot_cost
        return slots

    def kind(self, session: SessionView) -> str | None:
        """Return why the session needs a worker. See `SessionView.need`."""
        return session.need(self.is_gone)

    def settle(self, session: SessionView | None) -> None:
        """Update `wanting` for one session."""
        if session is None or session.id not in self.sessions:
            return
        if session.in_doubt or self.kind(session) is not None:
            self.wanting.add(session.id)
        else:
            self.wanting.discard(session.id)
            session.waiting = None

    def _count(self, record: SessionRecord) -> None:
        worker, target = (self.workers.get(name or "") for name in (record.worker, record.target))
        if worker is not None and record.phase.holds_slot:
            worker.hold(record.id, record.model)
        elif worker is not None and record.phase is Phase.SUSPENDED:
            worker.holding.add(record.id)
        if target is not None and record.phase.holds_slot:
            target.incoming.add(record.id)
        if record.target is not None:
            self.migrating.add(record.id)

    def _uncount(self, record: SessionRecord) -> None:
        for name in (record.worker, record.target):
            worker = self.workers.get(name or "")
            if worker is not None:
                worker.unhold(record.id, record.model)
                worker.holding.discard(record.id)
                worker.incoming.discard(record.id)
        self.migrating.discard(record.id)
