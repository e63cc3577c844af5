"""The view as placement sees it."""

from __future__ import annotations

from turboserve.contracts.sessions import Phase
from turboserve.scheduler import liveness
from turboserve.scheduler.known import SessionView, WorkerView
from turboserve.scheduler.placement import Cluster, SessionState, WorkerState
from turboserve.scheduler.view import View


def of(view: View, now: float, listened: float, timeout_s: float) -> Cluster:
    """All workers and sessions, with what is decided and not confirmed yet."""
    return Cluster(
        (worker_state(worker, now, listened, timeout_s) for worker in view.workers.values()),
        (session_state(view, session, now) for session in view.sessions.values()),
    )


def worker_state(worker: WorkerView, now: float, listened: float, timeout_s: float) -> WorkerState:
    return WorkerState(
        id=worker.id,
        model=worker.model,
        capacity=worker.capacity,
        ready=worker.ready and worker.full_until <= now,
        draining=worker.draining,
        suspect=liveness.is_suspect(worker, listened, timeout_s),
        chunk_latency_s=worker.chunk_latency_s,
        host=worker.host,
    )


def session_state(view: View, session: SessionView, now: float) -> SessionState:
    record = session.record
    excluded = {worker for worker, (_, until) in session.refusals.items() if until > now}
    excluded |= {worker for worker, until in session.move_failures.items() if until > now}
    return SessionState(
        id=session.id,
        model=record.model,
        worker=record.worker,
        suspended=record.phase is Phase.SUSPENDED,
        target=record.target or session.begun_to,
        reserved=None if session.begun_to else session.reserved_on,
        state_bytes=view.state_bytes.get(record.model, 0),
        movable=is_movable(view, session, now),
        rests_until=session.rests_until,
        excluded=frozenset(excluded),
    )


def is_movable(view: View, session: SessionView, now: float) -> bool:
    """Whether a move may be begun: its row is certain, it needs no worker, and its own gives state away."""
    source = view.workers.get(session.record.worker or "")
    return (
        session.is_free(now)
        and not session.must_read
        and session.record.move is None
        and view.kind(session) is None
        and source is not None
        and source.gives_state
    )
