"""Empties workers that drain and whose weights no other worker has: their sessions are placed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from turboserve.contracts.sessions import Activity, Decision
from turboserve.scheduler.class_views import classes_of, free_of, most_slots
from turboserve.scheduler.messages import Release
from turboserve.scheduler.migrations import Take
from turboserve.scheduler.session_view import SessionView
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_view import WorkerView


def hand_over(view: View, now: float, at_once: int, take: Take) -> Iterator[Release]:
    """Mark running sessions for another placement, and release suspended ones.

    For each class of a worker, at most `at_once` running sessions are marked, within the free slots of other
    workers, and at most `at_once` suspended ones are released.
    """
    for worker in view.workers.values():
        if not worker.draining:
            continue
        marked: Counter[str] = Counter()
        for of in classes_of(worker):
            yield from _hand_over_class(view, worker, of, marked, now, at_once, take)


def _hand_over_class(
    view: View,
    worker: WorkerView,
    of: tuple[str, str | None],
    marked: Counter[str],
    now: float,
    at_once: int,
    take: Take,
) -> Iterator[Release]:
    """`marked`: marked sessions of the worker for which there is room, by class. This adds the class's."""
    model, digest = of
    serving = [w for w in view.workers.values() if w.ready and w.serves(model)]
    if not serving:
        return
    same = any(w.digest_of(model) == digest for w in serving)
    if not same:
        room = sum(max(0, free_of(view, w, model)) for w in serving)
        if marked:
            # Sessions of other classes take slots of the same workers.
            room -= most_slots(view, model, marked)
        count = _mark(view, _of_class(view, worker, worker.used, model), now, min(room, at_once))
        # Marked sessions may have lost their room. They wait, and keep no slots from other classes.
        marked[model] = min(count, max(0, room))
    released = 0
    for session in _of_class(view, worker, worker.holding, model):
        if released < at_once and (not same or _is_stale(session, worker)) and _is_idle(session, now):
            released += 1
            yield _release(session, worker, take)


def _of_class(view: View, worker: WorkerView, names: set[str], model: str) -> Iterator[SessionView]:
    """The sessions of a class, in order of id; all of them on a worker that serves one class."""
    for name in sorted(names):
        session = view.sessions[name]
        if worker.classes is None or session.record.model == model:
            yield session


def _mark(view: View, sessions: Iterator[SessionView], now: float, room: int) -> int:
    """Mark sessions within the room. Returns how many are marked, those of earlier calls included."""
    before = room
    for session in sessions:
        if session.leaves_epoch == session.record.epoch:
            room -= 1
        elif room > 0 and _can_leave(session, now) and view.kind(session) is None:
            session.leaves_epoch = session.record.epoch
            view.settle(session)
            room -= 1
    return before - room


def _can_leave(session: SessionView, now: float) -> bool:
    """Whether the session's row is certain and it is not migrating."""
    return session.may_change(now) and session.record.migration is None


def _is_idle(session: SessionView, now: float) -> bool:
    """Whether the session can leave and no client wants it to run. Others are placed again anyway."""
    return _can_leave(session, now) and session.record.activity is not Activity.WATCHING


def _is_stale(session: SessionView, worker: WorkerView) -> bool:
    """Whether the worker cannot have the session's state, because it was restarted with other weights."""
    digest, here = session.record.weights_digest, worker.digest_of(session.record.model)
    return None not in (digest, here) and digest != here


def _release(session: SessionView, worker: WorkerView, take: Take) -> Release:
    digest = worker.digest_of(session.record.model)
    reason = f"{worker.id} is draining, and no other worker has its weights {digest}"
    decision = Decision(session=session.id, epoch=session.record.epoch, kind="release", reason=reason)
    return Release(take(session), session.record.version, decision)
