"""Limits of what a caller may request, beyond the endpoints of its role, which the bus has checked."""

from __future__ import annotations

from turboserve.contracts.base import Contract
from turboserve.contracts.errors import ForbiddenError
from turboserve.contracts.requests import FailSession, GetLatents, Renew, WorkerGone
from turboserve.subjects import Caller, identity_of


def check(caller: Caller, request: Contract) -> None:
    """Raise ForbiddenError for a request that this caller may not make.

    A scheduler that declares a worker gone has to name its term and the renewal that it read, so that the
    state store can refuse a scheduler that does not lead or is mistaken. A worker with its own broker user
    may only make requests for workers of its identity.
    """
    if isinstance(request, WorkerGone) and caller.role == "scheduler":
        for field in ("term", "renewed_at"):
            if getattr(request, field) is None:
                raise ForbiddenError(f"{field}: required from a scheduler", field=field)
    if caller.role == "worker" and caller.id is not None:
        worker = _worker_of(request)
        if worker is not None and identity_of(worker) != caller.id:
            raise ForbiddenError(
                f"worker: {worker} does not begin with {caller.id}_", field="worker", limit=caller.id
            )


def _worker_of(request: Contract) -> str | None:
    """Return the worker that the request is made for."""
    if isinstance(request, Renew):
        return request.load.worker
    return request.worker if isinstance(request, FailSession | GetLatents) else None
