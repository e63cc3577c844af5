"""Applies the outcomes of commands to the view. If an outcome is in doubt, the row is read again."""

from __future__ import annotations

from turboserve.scheduler.messages import (
    Answered,
    BeginMigration,
    CommitMigration,
    DeclareGone,
    OfSession,
    Place,
    Refused,
    SuspendIdle,
)
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.session_view import InDoubt, Retry, SessionView, Settled, Uncommittable
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_view import Undeclared


def settle_declaration(view: View, policy: Policy, command: DeclareGone, event: Answered, now: float) -> None:
    """Remove a worker that the store declared gone, or schedule another declaration."""
    worker = view.workers.get(command.worker)
    if event.refused in (None, Refused.NOT_FOUND, Refused.WORKER_GONE):
        view.drop_worker(command.worker)
    elif worker is not None:
        worker.declaration = Undeclared(until=now + policy.retry_s)


def settle_session(
    view: View,
    policy: Policy,
    session: SessionView,
    command: OfSession,
    event: Answered,
    now: float,
    listened: float,
) -> bool:
    """Apply the outcome of a session's command; returns whether the outcome calls for a full listing.

    The reservation remains until the row is known, because a command without an answer may have succeeded.
    """
    refused = event.refused
    surprised = False
    if event.record is not None:
        session.row_state, session.retry = Settled(), None
        if view.put_session(event.record, listened) is None:
            return False
        surprised = session.record.worker is not None and not view.knows(session.record.worker)
    elif refused is Refused.NOT_FOUND:
        view.drop_session(session.id)
        return False
    elif isinstance(command, Place | BeginMigration) and refused is Refused.NO_CAPACITY:
        surprised = True
        if command.worker in view.workers:
            view.workers[command.worker].full_until = now + policy.full_s
    elif isinstance(command, Place | BeginMigration | CommitMigration) and refused is Refused.WORKER_GONE:
        view.drop_worker(command.worker)
        # The store has ended all migrations to a gone worker, so the row has changed.
        if isinstance(command, CommitMigration):
            session.row_state = InDoubt()
    elif refused is Refused.STALE_STATE:
        if session.migration is not None:
            reason = "the log has a later chunk than the state that was copied"
            session.migration = Uncommittable(session.migration.migration, reason)
    else:
        if refused is not Refused.CONFLICT:
            failures = 1 if session.retry is None else session.retry.failures + 1
            session.retry = Retry(failures, not_before=now + policy.retry_after(failures))
        if refused is not Refused.NOT_SENT:
            session.row_state = InDoubt()
    if isinstance(command, SuspendIdle) and refused is not None:
        # The store may know of a viewer that the view does not, so the idle time starts again.
        session.watched_at = listened
    if not session.in_doubt:
        view.release(session)
    view.settle(session)
    return surprised
