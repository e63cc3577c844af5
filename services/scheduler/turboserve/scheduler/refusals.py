"""Workers that will not run a session that they were given, and that take it back."""

from __future__ import annotations

from turboserve.contracts.workers import LoadReport, WorkerPhase
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.view import View
from turboserve.scheduler.view_models import WorkerView


def note_refusals(view: View, policy: Policy, worker: WorkerView, report: LoadReport, now: float) -> None:
    """Take in what `worker` refuses, and what it refuses no longer."""
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
    """A refusal stands in every report while it lasts: what is not in this one runs there, or will.

    A worker that was started again refuses what it had until it has loaded. While it loads, what it does not
    mention says nothing: it may not have read its rows yet.
    """
    refused = {(refusal.session, refusal.epoch) for refusal in report.refusals}
    for name in list(worker.used):
        session = view.sessions[name]
        epoch = session.refused_epoch
        if epoch is not None and session.record.worker == worker.id and (name, epoch) not in refused:
            session.refused_epoch = None
            view.settle(session)
