"""What placement and operators see of the scheduler's view."""

from __future__ import annotations

from collections.abc import Mapping

from turboserve.contracts.loans import LoanRole
from turboserve.contracts.sessions import Phase
from turboserve.scheduler.class_views import shared_workers, with_entries, worker_states
from turboserve.scheduler.placement import Cluster, SessionState, WorkerState
from turboserve.scheduler.session_view import SessionView
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_classes import worker_of
from turboserve.scheduler.worker_view import WorkerView

LOOK_S = 0.2
"""Listening time between two checks of all workers for silence, in seconds."""
SIZE_CHANGE = 0.2
"""Relative change of a state's size that updates the cost of migrations."""


class ClusterProjection:
    """The cluster as placement sees it, updated only where the view has changed."""

    def __init__(self, view: View, timeout_s: float, target_chunk_s: float | None = None) -> None:
        """`target_chunk_s` is passed to `Cluster`."""
        self._view = view
        self._timeout_s = timeout_s
        self._cluster = Cluster(target_chunk_s=target_chunk_s)
        self._entries: dict[str, tuple[str, ...]] = {}
        """Worker → names of its entries in the cluster."""
        self.several = False
        """Whether a worker has ever had several."""
        self._provides: dict[str, bool] = {}
        """Worker → whether it provides state to others. The `movable` of its sessions depends on this."""
        self._timed_workers: set[str] = set()
        """Workers whose state will change by time alone."""
        self._timed_sessions: set[str] = set()
        """Sessions whose state will change by time alone."""
        self._absorbing: set[str] = set()
        """Models whose workers may hold more than K sessions, by the cluster. That ends by time alone."""
        self._suspects: set[str] = set()
        """Workers that are suspect, by the cluster."""
        self._looked_at = float("-inf")
        self.changed_loads: set[str] = set()
        """Workers whose load or room may have changed since the load feedback last read this set."""
        self._sizes: dict[str, int] = {}
        """Model → bytes of a session's state, as last put into the cluster."""

    def cluster(self, now: float, listened: float) -> Cluster:
        """Update and return the cluster (always the same object), including unconfirmed decisions."""
        view = self._view
        workers = view.changed_workers | self._timed_workers
        workers |= self._suspicion_changed(listened)
        if ended := {model for model in self._absorbing if not view.absorbs(model, listened)}:
            self._absorbing -= ended
            workers |= {name for name, worker in view.workers.items() if worker.model in ended}
        view.changed_workers.clear()
        for name in workers:
            self._put_worker(name, now, listened)
        for model, size in view.state_bytes.items():
            known = self._sizes.get(model)
            # Sizes vary a little with every migration. A small change is not worth an update of all sessions.
            if known is None or abs(size - known) > SIZE_CHANGE * known:
                self._sizes[model] = size
                view.changed_sessions.update(s.id for s in view.sessions.values() if s.record.model == model)
        sessions = view.changed_sessions | self._timed_sessions
        view.changed_sessions.clear()
        shared = shared_workers(self._cluster, sessions) if self.several else set()
        for name in sessions:
            self._put_session(name, now)
        if self.several:
            # Sessions of one class take slots of the others.
            for name in shared | shared_workers(self._cluster, sessions):
                self._put_worker(name, now, listened)
        for name in view.changed_slacks:
            session = view.sessions.get(name)
            self._cluster.put_slack(name, None if session is None else session.slack)
        view.changed_slacks.clear()
        return self._cluster

    def _suspicion_changed(self, listened: float) -> set[str]:
        """Return the workers that have become suspect or ceased to be. Silence is checked at intervals."""
        suspects, timeout_s = self._suspects, self._timeout_s
        if listened - self._looked_at >= LOOK_S:
            self._looked_at = listened
            workers = self._view.workers.values()
            return {one.id for one in workers if one.is_suspect(listened, timeout_s)} ^ suspects
        heard = (self._view.workers.get(name) for name in suspects)
        return {one.id for one in heard if one is not None and not one.is_suspect(listened, timeout_s)}

    def _put_worker(self, name: str, now: float, listened: float) -> None:
        worker = self._view.workers.get(name)
        self.changed_loads.add(name)
        gave = self._provides.get(name)
        entries: dict[str, WorkerState] = {}
        if worker is None:
            self._provides.pop(name, None)
            self._timed_workers.discard(name)
            self._suspects.discard(name)
        else:
            self._provides[name] = worker.provides_state
            (self._timed_workers.add if worker.full_until > now else self._timed_workers.discard)(name)
            if absorbs := self._view.absorbs(worker.model, listened):
                self._absorbing.add(worker.model)
            state = worker_state(worker, now, listened, self._timeout_s, absorbs)
            (self._suspects.add if state.suspect else self._suspects.discard)(name)
            entries = worker_states(self._view, worker, state)
        for former in self._entries.get(name, (name,)):
            if former not in entries:
                if "/" in former and (known := self._cluster.entries.get(former)) is not None:
                    # Its sessions name the worker from now on.
                    self._view.changed_sessions |= known.here | known.coming | known.suspended
                self._cluster.drop_worker(former)
                if worker is not None:
                    self._view.changed_sessions |= worker.used | worker.holding | worker.load_names
                    self.several = True
        self._entries[name] = tuple(entries)
        if not entries:
            del self._entries[name]
        for state in entries.values():
            self._cluster.put_worker(state)
        if gave != self._provides.get(name):
            for entry in entries or (name,):
                if (known := self._cluster.entries.get(entry)) is not None:
                    self._view.changed_sessions.update(known.here, known.suspended)

    def _put_session(self, name: str, now: float) -> None:
        session, before = self._view.sessions.get(name), self._cluster.sessions.get(name)
        if before is not None:
            self.changed_loads |= {
                worker_of(one or "") for one in (before.worker, before.target, before.reserved)
            }
        if session is None:
            self._timed_sessions.discard(name)
            self._cluster.drop_session(name)
            return
        backs_off = session.retry is not None and session.retry.not_before > now
        timed = backs_off or session.refusals or session.migration_failures
        (self._timed_sessions.add if timed else self._timed_sessions.discard)(name)
        state = session_state(self._view, session, now, self._sizes)
        self.changed_loads |= {state.worker or "", state.target or "", state.reserved or ""}
        self._cluster.put_session(with_entries(self._view, state))


def worker_state(
    worker: WorkerView, now: float, listened: float, timeout_s: float, absorbs: bool = False
) -> WorkerState:
    return WorkerState(
        id=worker.id,
        model=worker.model,
        capacity=worker.capacity,
        weights_digest=worker.weights_digest,
        ready=worker.ready and worker.full_until <= now,
        draining=worker.draining,
        suspect=worker.is_suspect(listened, timeout_s),
        chunk_latency_s=worker.chunk_latency_s,
        floor_capacity=worker.floor_capacity,
        floor_chunk_latency_s=worker.floor_chunk_latency_s,
        absorbs=absorbs,
        changed_outside=worker.changed_outside,
        host=worker.host,
        lends=worker.loan is not None and worker.loan.role is LoanRole.DONOR,
    )


def session_state(view: View, session: SessionView, now: float, sizes: Mapping[str, int]) -> SessionState:
    record = session.record
    excluded = {worker for worker, (_, until) in session.refusals.items() if until > now}
    excluded |= {worker for worker, until in session.migration_failures.items() if until > now}
    return SessionState(
        id=session.id,
        model=record.model,
        worker=record.worker,
        suspended=record.phase is Phase.SUSPENDED,
        target=record.target or session.begun_to,
        # The slot stays reserved while a migration begins, even if the session has been suspended meanwhile.
        reserved=session.reserved_on,
        state_bytes=sizes.get(record.model, 0),
        weights_digest=record.weights_digest,
        movable=is_movable(view, session, now),
        rests_until=session.rests_until,
        retries_at=session.retries_at,
        excluded=frozenset(excluded),
        left=session.left,
    )


def is_movable(view: View, session: SessionView, now: float) -> bool:
    """Whether a migration may begin.

    The row must be certain, the session must not need a worker, and its own worker must provide its state.
    """
    source = view.workers.get(session.record.worker or "")
    return (
        session.may_change(now)
        and session.record.migration is None
        and view.kind(session) is None
        and source is not None
        and source.provides_state
        # A worker restarted under the same id with other weights has no state of the session.
        and (
            (digest := source.digest_of(session.record.model)) is None
            or session.record.weights_digest in (None, digest)
        )
    )
