"""Applies the outcomes of commands and the refusals of workers to the view.

If an outcome is in doubt, the row is read again.
"""

from __future__ import annotations

from turboserve.contracts.workers import LoadReport, WorkerPhase
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
from turboserve.scheduler.worker_view import Undeclared, WorkerView


class PendingQuery:
    """One kind of listing. At most one is under way, and two are at least `least_s` apart."""

    def __init__(self, least_s: float) -> None:
        self.wanted = False
        self._least_s = least_s
        self._ticket: int | None = None
        self._asked_at: float | None = None
        self._asked_listening = 0.0

    def due(self, now: float) -> bool:
        rested = self._asked_at is None or now - self._asked_at >= self._least_s
        return self.wanted and self._ticket is None and rested

    def older_than(self, seconds: float, now: float) -> bool:
        """Whether the last listing was requested at least `seconds` ago; False if there was none."""
        return self._asked_at is not None and now - self._asked_at >= seconds

    def ask(self, ticket: int, now: float, listened: float) -> None:
        self.wanted = False
        self._ticket, self._asked_at, self._asked_listening = ticket, now, listened

    def answered(self, ticket: int) -> float | None:
        """End the listing; returns the listening time of its request, or None if `ticket` is another one."""
        if ticket != self._ticket:
            return None
        self._ticket = None
        return self._asked_listening


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


def note_refusals(view: View, policy: Policy, worker: WorkerView, report: LoadReport, now: float) -> None:
    """Apply the refusals in a worker's load report, and end those that the report no longer has."""
    for refusal in report.refusals:
        session = view.sessions.get(refusal.session)
        if (
            session is None
            or session.record.worker != report.worker
            or session.record.epoch != refusal.epoch
            or session.refused_epoch == refusal.epoch
        ):
            continue
        times = session.refusals.get(report.worker, (0, 0.0))[0] + 1
        session.refusals[report.worker] = (times, now + policy.rest_after(times))
        session.refused_epoch = refusal.epoch
        view.settle(session)
    if report.phase is not WorkerPhase.STARTING:
        _take_back(view, worker, report)


def _take_back(view: View, worker: WorkerView, report: LoadReport) -> None:
    """End refusals that are not in this report. A worker repeats each refusal in every report while it lasts.

    Do not call this for a worker that loads its model: a restarted worker may not have read its rows yet, so
    a missing refusal proves nothing.
    """
    refused = {(refusal.session, refusal.epoch) for refusal in report.refusals}
    for name in list(worker.used):
        session = view.sessions[name]
        epoch = session.refused_epoch
        if epoch is not None and session.record.worker == worker.id and (name, epoch) not in refused:
            session.refused_epoch = None
            view.settle(session)
