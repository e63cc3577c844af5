"""The demand of a pool by class: what the scheduler counts now, and a quantile of what comes.

The scheduler reports the sessions that need a worker for each class (N_req), so no total has to be split.
Each class has a forecast of its own: the present demand, its trend, and a quantile of the errors of earlier
forecasts. No less than the peak of a window is expected, since most bursts return.

A class that no worker serves and that no session wants is not reported. If another class is, it has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from turboserve.autoscaler.control.feedback_monitor import FeedbackMonitor
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.autoscaler.control.scale_in import Peak
from turboserve.autoscaler.control.workload import Forecast
from turboserve.contracts.decoding import DecodeCapacity
from turboserve.contracts.pool import LoadFeedback

ROUNDING = 1e-9


class _Class:
    def __init__(self, policy: ControlPolicy) -> None:
        self.monitor = FeedbackMonitor(policy.stale_s)
        self.forecast = Forecast(policy.horizon_s, policy.quantile)
        self.peak = Peak(policy.peak_window_s)

    def observe(self, required: int, now: float) -> None:
        self.forecast.observe(required, now)
        self.peak.add(required, now)


class ClassDemand:
    """Keeps the feedback and the forecast of each class.

    Where workers serve several classes, the sessions of a class are counted without those of the others.
    """

    def __init__(self, models: Sequence[str], policy: ControlPolicy) -> None:
        """The policy's `horizon_s`, `quantile`, `peak_window_s` and `stale_s` count."""
        self._classes = {model: _Class(policy) for model in models}
        self._stale_s, self._window_s = policy.stale_s, policy.peak_window_s
        self._heard_at: float | None = None
        self._since: float | None = None
        """Start of the last time without a gap above `stale_s` in the reports of all classes."""

    def update(self, feedback: LoadFeedback, now: float) -> str | None:
        """Apply one report at monotonic time `now`. Returns what is wrong with it; None if nothing is."""
        own = self._classes.get(feedback.model)
        if own is None:
            return "another_model"
        refused = own.monitor.refused.copy()
        if not own.monitor.update(feedback, now):
            return next(iter(own.monitor.refused - refused))
        if self.is_stale(now):
            self._since = now
        self._heard_at = now
        own.observe(_required(own), now)
        for other in self._classes.values():
            if other is not own and other.monitor.is_stale(now):
                other.observe(0, now)
        return None

    def is_stale(self, now: float) -> bool:
        """Whether no class was reported lately."""
        return self._heard_at is None or now - self._heard_at > self._stale_s

    def covers_window(self, now: float) -> bool:
        """Whether reports have come without a gap for the window of the peaks."""
        return self._since is not None and not self.is_stale(now) and now - self._since >= self._window_s

    def accepted(self, now: float) -> dict[str, LoadFeedback]:
        """Return the newest report of each class that was reported lately."""
        return {
            model: one.monitor.feedback
            for model, one in self._classes.items()
            if one.monitor.feedback is not None and not one.monitor.is_stale(now)
        }

    def live(self, now: float) -> dict[str, int]:
        """Return the sessions that need a worker now, by class. While nothing is reported: the last ones."""
        return {
            model: 0 if self._is_silent(one, now) else _required(one) for model, one in self._classes.items()
        }

    def expected(self, now: float) -> dict[str, int]:
        """Return the sessions to have places for, by class: the forecast, or the peak if that is more."""
        found = {}
        for model, live in self.live(now).items():
            one = self._classes[model]
            ahead = math.ceil((one.forecast.value or 0.0) - ROUNDING)
            found[model] = max(live, ahead, one.peak.over(self._window_s, now))
        return found

    def total(self, feedback: LoadFeedback, now: float) -> LoadFeedback:
        """Return the load of all classes, as of `feedback`, the last report that was applied.

        A worker of several classes counts once for each.
        """
        parts = list(self.accepted(now).values())
        required = sum(map(own_sessions, parts))
        return feedback.model_copy(
            update={
                "rho_max": max((part.rho_max for part in parts), default=0.0),
                **{name: sum(getattr(part, name) for part in parts) for name in ("capacity", "workers")},
                "required": required,
                # Those of a class have a part of the sessions of others that wait for the same workers.
                "waiting": min(sum(part.waiting for part in parts), required),
                "own_required": None,
                "floor_capacity": None,
                "decoding": _decoding(parts),
            }
        )

    def _is_silent(self, one: _Class, now: float) -> bool:
        return not self.is_stale(now) and one.monitor.is_stale(now)


def _required(one: _Class) -> int:
    return 0 if one.monitor.feedback is None else own_sessions(one.monitor.feedback)


def own_sessions(feedback: LoadFeedback) -> int:
    """Return the sessions of the class that need a worker, without those of other classes."""
    return feedback.required if feedback.own_required is None else feedback.own_required


def _decoding(parts: Sequence[LoadFeedback]) -> DecodeCapacity | None:
    """The decode workers of all classes. None: a class has none, so that not all sessions need them."""
    known = [part.decoding for part in parts if part.decoding is not None]
    if not known or len(known) < sum(part.workers > 0 for part in parts):
        return None
    return DecodeCapacity(
        workers=sum(each.workers for each in known),
        sessions=sum(each.sessions for each in known),
        denoised=sum(each.denoised for each in known),
        own=sum(each.own for each in known),
    )
