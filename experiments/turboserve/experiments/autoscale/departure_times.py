"""When so many sessions will have left, as each forecast of departures lets expect.

The state store measures how exact the forecasts are, but no decision of it asks for these times.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

from turboserve.state_store.core.behavior_learner import BehaviorLearner, ForecastErrors
from turboserve.state_store.core.departures import STEP_S, ExpectedDepartures, SteadyDepartures

LEAST_GAIN = 0.9
"""The forecast by behavior is clearly better if its errors are less than this part of the other's."""


class DepartureTimes(Protocol):
    """A forecast of the times of departures."""

    def time_of(self, count: float) -> float | None:
        """Return in how many seconds `count` sessions will have left. None: not at all."""


@dataclass(frozen=True)
class SteadyTimes:
    """As many sessions leave per second as have left lately."""

    departures: SteadyDepartures

    def time_of(self, count: float) -> float | None:
        rate = self.departures.rate
        return count / rate if rate > 0 else None


@dataclass(frozen=True)
class ExpectedTimes:
    """Times by a forecast that has been known for a while. Departures count from now on."""

    departures: ExpectedDepartures
    elapsed_s: float = 0.0
    """For how long the forecast has been known, seconds."""

    def by(self, at_s: float) -> float:
        """Return how many sessions will have left in `at_s` seconds."""
        return self.departures.by(self.elapsed_s + at_s) - self.departures.by(self.elapsed_s)

    def time_of(self, count: float) -> float | None:
        curve, last_rate = self.departures.curve, self.departures.last_rate
        wanted = count + self.departures.by(self.elapsed_s)
        place = bisect_left(curve, wanted)
        if place == 0:
            return 0.0
        if place == len(curve):
            if last_rate <= 0:
                return None
            at_s = (len(curve) - 1) * STEP_S + (wanted - curve[-1]) / last_rate
        else:
            before, after = curve[place - 1], curve[place]
            at_s = (place - 1 + (wanted - before) / (after - before)) * STEP_S
        return max(at_s - self.elapsed_s, 0.0)


def favor_behavior(errors: ForecastErrors) -> bool:
    """Return whether the forecast by behavior was clearly better, as far as is known."""
    part = errors.part
    return part is not None and part < LEAST_GAIN


def expected_times(learner: BehaviorLearner, elapsed_s: float) -> ExpectedTimes | None:
    """Return the times from `elapsed_s` after the learner's last renewal on.

    None: there is one class of behavior, no session holds a slot, or past forecasts by behavior were not
    better. Then the rate of the last minutes counts.
    """
    if learner.expected is None or not favor_behavior(learner.errors):
        return None
    return ExpectedTimes(learner.expected, elapsed_s)
