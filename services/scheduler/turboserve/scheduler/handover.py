"""Empties draining workers whose states no other worker can take, such as the last ones of a checkpoint.

Their sessions cannot migrate, so without this the drain would never end. Running sessions are placed on
another worker and continue from their latents. Suspended sessions have no owner until they are resumed.
"""

from __future__ import annotations

from collections.abc import Iterator

from turboserve.contracts.sessions import Activity, Decision
from turboserve.scheduler.messages import Release
from turboserve.scheduler.migrations import Take
from turboserve.scheduler.session_view import SessionView
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_view import WorkerView


def hand_over(view: View, now: float, at_once: int, take: Take) -> Iterator[Release]:
    """Mark running sessions for another placement, and release suspended ones.

    For each worker, at most `at_once` running sessions are marked, within the free slots of other workers,
    and at most `at_once` suspended ones are released.
    """
    for worker in view.workers.values():
        if not worker.draining:
            continue
        serving = [w for w in view.workers.values() if w.ready and w.model == worker.model]
        if not serving:
            continue
        same = any(w.weights_digest == worker.weights_digest for w in serving)
        if not same:
            room = sum(max(0, w.capacity - w.load) for w in serving)
            _mark(view, worker, now, min(room, at_once))
        released = 0
        for name in sorted(worker.holding):
            session = view.sessions[name]
            if released < at_once and (not same or _is_stale(session, worker)) and _is_idle(session, now):
                released += 1
                yield _release(session, worker, take)


def _mark(view: View, worker: WorkerView, now: float, room: int) -> None:
    for name in sorted(worker.used):
        session = view.sessions[name]
        if session.leaves_epoch == session.record.epoch:
            room -= 1
        elif room > 0 and _can_leave(session, now) and view.kind(session) is None:
            session.leaves_epoch = session.record.epoch
            view.settle(session)
            room -= 1


def _can_leave(session: SessionView, now: float) -> bool:
    """Whether the session's row is certain and it is not migrating."""
    return session.may_change(now) and session.record.migration is None


def _is_idle(session: SessionView, now: float) -> bool:
    """Whether the session can leave and no client wants it to run. Others are placed again anyway."""
    return _can_leave(session, now) and session.record.activity is not Activity.WATCHING


def _is_stale(session: SessionView, worker: WorkerView) -> bool:
    """Whether the worker cannot have the session's state, because it was restarted with other weights."""
    digest = session.record.weights_digest
    return None not in (digest, worker.weights_digest) and digest != worker.weights_digest


def _release(session: SessionView, worker: WorkerView, take: Take) -> Release:
    reason = f"{worker.id} is draining, and no other worker has its weights {worker.weights_digest}"
    decision = Decision(session=session.id, epoch=session.record.epoch, kind="release", reason=reason)
    return Release(take(session), session.record.version, decision)
