"""The load signal that closes the loop to the autoscaler (TurboServe, 5.2.2)."""

from __future__ import annotations

from collections import Counter

from turboserve.contracts.pool import LoadFeedback
from turboserve.scheduler.view import View


def load_feedback(view: View, decisions: int) -> list[LoadFeedback]:
    """One per model that a worker serves or a session wants, in order of name."""
    models = {worker.model for worker in view.workers.values()}
    required: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for worker in view.workers.values():
        required[worker.model] += len(worker.used)
    for name in view.wanting:
        session = view.sessions[name]
        if view.kind(session) is not None:
            waiting[session.record.model] += 1
            # One that its worker refused still holds that worker's slot: it is counted there.
            owner = view.workers.get(session.record.worker or "")
            required[session.record.model] += owner is None or name not in owner.used
    return [
        _of_model(view, model, required[model], waiting[model], decisions)
        for model in sorted(models | required.keys())
    ]


def _of_model(view: View, model: str, required: int, waiting: int, decisions: int) -> LoadFeedback:
    ready = [w for w in view.workers.values() if w.model == model and w.ready and w.capacity > 0]
    return LoadFeedback(
        model=model,
        rho_max=max((worker.load / worker.capacity for worker in ready), default=0.0),
        required=required,
        waiting=waiting,
        capacity=sum(worker.capacity for worker in ready),
        workers=len(ready),
        decisions=decisions,
    )
