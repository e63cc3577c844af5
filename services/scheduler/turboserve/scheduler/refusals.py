"""Workers' refusals to run a session that they own, and the end of such refusals."""

from __future__ import annotations

from turboserve.contracts.workers import LoadReport, WorkerPhase
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_view import WorkerView


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
