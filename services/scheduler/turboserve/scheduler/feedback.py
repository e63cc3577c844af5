"""The load signal that closes the loop to the autoscaler (TurboServe, 5.2.2)."""

from __future__ import annotations

from turboserve.contracts.pool import LoadFeedback
from turboserve.scheduler.view import View


def load_feedback(view: View, decisions: int) -> list[LoadFeedback]:
    """One per model that a worker serves or a session wants, in order of name."""
    models = {worker.model for worker in view.workers.values()}
    required: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for session in view.sessions.values():
        model = session.record.model
        waits = view.kind(session) is not None
        if waits:
            waiting[model] = waiting.get(model, 0) + 1
        if waits or session.record.phase.holds_slot:
            required[model] = required.get(model, 0) + 1
    return [
        _of_model(view, model, required.get(model, 0), waiting.get(model, 0), decisions)
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
