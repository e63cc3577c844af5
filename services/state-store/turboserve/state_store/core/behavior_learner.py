"""What is learned of the behavior of one model's sessions, and whether it forecasts departures better."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

from turboserve.state_store.core.behavior_classes import BehaviorModel, learn
from turboserve.state_store.core.departures import ExpectedDepartures, SteadyDepartures, expected
from turboserve.state_store.core.session_spans import SessionSpan, SessionTimes, spans_of

COMPARED_S = 60.0
"""Time for which the two forecasts are compared, seconds."""
COMPARED = 40
"""Maximum number of comparisons that count, the last ones."""
LEAST_COMPARED = 8
"""With fewer comparisons, it is not known which forecast is better."""


class ForecastErrors:
    """Errors of both forecasts of departures, at the same moments."""

    def __init__(self) -> None:
        self._made: deque[tuple[float, float, float]] = deque(maxlen=COMPARED)
        """When a forecast was made (Unix seconds), and the numbers that each one expects."""
        self._errors: deque[tuple[float, float]] = deque(maxlen=COMPARED)
        """Absolute errors of the steady one, and of the one by behavior."""

    def add(self, at: float, steady: float, by_behavior: float) -> None:
        """Note how many departures the forecasts expect within `COMPARED_S` of `at`."""
        self._made.append((at, steady, by_behavior))

    def compare(self, left_at: Sequence[float], since: float, now: float) -> None:
        """Compare the forecasts whose time is over with the departures, of which all after `since` are known.

        `left_at`: rising.
        """
        while self._made and self._made[0][0] + COMPARED_S <= now:
            at, steady, by_behavior = self._made.popleft()
            if at < since:
                continue
            actual = bisect_right(left_at, at + COMPARED_S) - bisect_right(left_at, at)
            self._errors.append((abs(actual - steady), abs(actual - by_behavior)))

    @property
    def part(self) -> float | None:
        """Errors of the forecast by behavior as a part of the steady one's. None: too few are known."""
        steady = sum(errors[0] for errors in self._errors)
        if len(self._errors) < LEAST_COMPARED or steady <= 0:
            return None
        return sum(errors[1] for errors in self._errors) / steady


class BehaviorLearner:
    """Learns from rows. A restart loses only hysteresis and the errors of past forecasts."""

    def __init__(self) -> None:
        self.model: BehaviorModel | None = None
        self.spans: list[SessionSpan] = []
        self.errors = ForecastErrors()
        self.expected: ExpectedDepartures | None = None
        """The forecast by behavior as of the last renewal. None: one class of behavior, or no session holds a
        slot."""

    def renew(self, rows: Iterable[SessionTimes], since: float, steady: SteadyDepartures, now: float) -> None:
        """Learn from the sessions that live, or have left after `since` (Unix seconds), as of `now`.

        `steady`: the departures that are expected without behavior.
        """
        self.spans, begins = spans_of(rows, since, now)
        self.model = learn(self.spans, self.model.live if self.model is not None else None)
        left_at = sorted(now - span.left_ago_s for span in self.spans if span.left_ago_s is not None)
        self.errors.compare(left_at, begins, now)
        by_behavior = expected(self.model, self.spans)
        self.expected = by_behavior.mean_with(steady) if by_behavior is not None else None
        if self.expected is not None:
            self.errors.add(now, steady.by(COMPARED_S), self.expected.by(COMPARED_S))
