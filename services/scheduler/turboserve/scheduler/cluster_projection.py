"""Projects the scheduler's view to the cluster that placement works on."""

from __future__ import annotations

from collections.abc import Mapping

from turboserve.contracts.sessions import Phase
from turboserve.scheduler.placement import Cluster, SessionState, WorkerState
from turboserve.scheduler.session_view import SessionView
from turboserve.scheduler.view import View
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
        self._provides: dict[str, bool] = {}
        """Worker → whether it provides state to others. The `movable` of its sessions depends on this."""
        self._timed_workers: set[str] = set()
        """Workers whose state will change by time alone."""
        self._timed_sessions: set[str] = set()
        """Sessions whose state will change by time alone."""
        self._looked_at = float("-inf")
        self._sizes: dict[str, int] = {}
        """Model → bytes of a session's state, as last put into the cluster."""

    def cluster(self, now: float, listened: float) -> Cluster:
        """Update and return the cluster (always the same object), including unconfirmed decisions."""
        view = self._view
        workers = view.changed_workers | self._timed_workers
        if listened - self._looked_at >= LOOK_S:
            self._looked_at = listened
            workers |= view.workers.keys()
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
        for name in sessions:
            self._put_session(name, now)
        return self._cluster

    def _put_worker(self, name: str, now: float, listened: float) -> None:
        worker = self._view.workers.get(name)
        gave = self._provides.get(name)
        if worker is None:
            self._provides.pop(name, None)
            self._timed_workers.discard(name)
            self._cluster.drop_worker(name)
        else:
            self._provides[name] = worker.provides_state
            (self._timed_workers.add if worker.full_until > now else self._timed_workers.discard)(name)
            self._cluster.put_worker(worker_state(worker, now, listened, self._timeout_s))
        if gave != self._provides.get(name) and (entry := self._cluster.entries.get(name)) is not None:
            self._view.changed_sessions.update(entry.here, entry.suspended)

    def _put_session(self, name: str, now: float) -> None:
        session = self._view.sessions.get(name)
        if session is None:
            self._timed_sessions.discard(name)
            self._cluster.drop_session(name)
            return
        backs_off = session.retry is not None and session.retry.not_before > now
        timed = backs_off or session.refusals or session.migration_failures
        (self._timed_sessions.add if timed else self._timed_sessions.discard)(name)
        self._cluster.put_session(session_state(self._view, session, now, self._sizes))


def worker_state(worker: WorkerView, now: float, listened: float, timeout_s: float) -> WorkerState:
    return WorkerState(
        id=worker.id,
        model=worker.model,
        capacity=worker.capacity,
        weights_digest=worker.weights_digest,
        ready=worker.ready and worker.full_until <= now,
        draining=worker.draining,
        suspect=worker.is_suspect(listened, timeout_s),
        chunk_latency_s=worker.chunk_latency_s,
        host=worker.host,
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
        excluded=frozenset(excluded),
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
        and (source.weights_digest is None or session.record.weights_digest in (None, source.weights_digest))
    )
