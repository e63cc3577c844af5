"""The load feedback to the autoscaler (TurboServe, 5.2.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from turboserve.contracts.pool import LoadFeedback
from turboserve.scheduler.messages import SendFeedback
from turboserve.scheduler.view import View


class Feedback:
    """Decides when to send load feedback, by what was last sent and when."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._sent_at: float | None = None
        self._sent: list[LoadFeedback] = []

    def reports(
        self, view: View, slots: Callable[[str], int], decisions: int, now: float, quiet: bool
    ) -> list[SendFeedback]:
        """Return the load feedback to send now: if it has changed, or if `every_s` has passed.

        `slots` returns K of a worker. `quiet`: nothing was decided, so the load is not computed before
        `every_s` has passed.
        """
        due = self._sent_at is None or now >= self._sent_at + self._every_s
        if quiet and not due:
            return []
        load = load_feedback(view, slots, decisions)
        if not due and load == self._sent:
            return []
        self._sent_at, self._sent = now, load
        return [SendFeedback(one) for one in load]


def load_feedback(view: View, slots: Callable[[str], int], decisions: int) -> list[LoadFeedback]:
    """Return one message per model that a worker serves or a session wants, ordered by name."""
    models = {worker.model for worker in view.workers.values()}
    required: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for worker in view.workers.values():
        required[worker.model] += len(worker.used)
    for name in view.wanting:
        session = view.sessions[name]
        if view.kind(session) is not None:
            waiting[session.record.model] += 1
            # A session that its worker refused still holds that worker's slot, and is counted there.
            owner = view.workers.get(session.record.worker or "")
            required[session.record.model] += owner is None or name not in owner.used
    return [
        _of_model(view, slots, model, required[model], waiting[model], decisions)
        for model in sorted(models | required.keys())
    ]


def _of_model(
    view: View, slots: Callable[[str], int], model: str, required: int, waiting: int, decisions: int
) -> LoadFeedback:
    serving = [w for w in view.workers.values() if w.model == model and w.ready]
    ready = [(worker.load, k) for worker in serving if (k := slots(worker.id)) > 0]
    return LoadFeedback(
        model=model,
        rho_max=max((load / k for load, k in ready), default=0.0),
        required=required,
        waiting=waiting,
        capacity=sum(k for _, k in ready),
        workers=len(ready),
        decisions=decisions,
    )
