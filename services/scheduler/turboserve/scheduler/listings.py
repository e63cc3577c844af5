"""Applies listings of the state store's rows to the view. A listing finds what no event has reported."""

from __future__ import annotations

from collections.abc import Iterable

from turboserve.contracts.workers import WorkerRecord
from turboserve.scheduler.messages import AllListed
from turboserve.scheduler.view import View


def apply_workers(
    view: View, ticket: int, asked_at: float, records: Iterable[WorkerRecord], listened: float
) -> None:
    """Apply the rows of all workers, which were requested under `ticket` at listening time `asked_at`.

    `listened` is the listening time now.
    """
    listed: set[str] = set()
    for record in records:
        listed.add(record.id)
        known = view.workers.get(record.id)
        if known is not None:
            known.looked(record.renewed_at, asked_at, listened)
        view.put_worker(record, listened)
    for worker in list(view.workers.values()):
        # The view had the worker before the request, so a listing without it means that it is gone.
        if worker.id not in listed and worker.known_since < ticket:
            view.drop_worker(worker.id)


def apply_all(view: View, event: AllListed, asked_at: float, listened: float) -> None:
    """Apply the rows of all workers and sessions. See `apply_workers`."""
    apply_workers(view, event.ticket, asked_at, event.workers, listened)
    for record in event.sessions:
        session = view.put_session(record, listened)
        if session is None:
            continue
        owner = session.record.worker
        # The executor lists workers after sessions, so an owner that is not listed is gone.
        if owner is not None and session.record.version == record.version and not view.knows(owner):
            view.drop_worker(owner)
        view.settle(session)
    listed = {record.id for record in event.sessions}
    for session in list(view.sessions.values()):
        if session.id not in listed and session.touched < event.ticket and session.ticket is None:
            view.forget_session(session.id)
