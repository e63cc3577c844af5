"""When sessions leave their slots: at the rate of the last minutes, or as their behavior lets expect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from turboserve.state_store.core.behavior_classes import BehaviorModel, nearest
from turboserve.state_store.core.forecast import WINDOW_S as COUNTED_S
from turboserve.state_store.core.session_spans import SessionSpan, SessionTimes

STEP_S = 10.0
STEPS = 30
"""The curve has this many steps of `STEP_S`. After them it goes on as in the last ones."""
LAST_STEPS = 6
NEWCOMERS_S = 300.0
"""Time after which a creation counts half where the next sessions are expected to be like the last ones."""


@dataclass(frozen=True, slots=True)
class SteadyDepartures:
    """As many sessions leave per second as have left lately."""

    rate: float

    def by(self, at_s: float) -> float:
        """Return how many sessions will have left in `at_s` seconds."""
        return self.rate * at_s


def steady_departures(rows: Iterable[SessionTimes], now: float) -> SteadyDepartures:
    """Return the rate at which sessions have left within `COUNTED_S`."""
    left = sum(row.left_at is not None and row.left_at > now - COUNTED_S for row in rows)
    return SteadyDepartures(left / COUNTED_S)


@dataclass(frozen=True)
class ExpectedDepartures:
    """The expected departures of the sessions that hold slots, and of those that take their places."""

    curve: tuple[float, ...]
    """Departures after 0, 1, 2, … steps of `STEP_S`."""

    def by(self, at_s: float) -> float:
        """Return how many sessions will have left in `at_s` seconds."""
        place = int(at_s / STEP_S)
        if place >= len(self.curve) - 1:
            return self.curve[-1] + self.last_rate * (at_s - (len(self.curve) - 1) * STEP_S)
        part = at_s / STEP_S - place
        return self.curve[place] * (1 - part) + self.curve[place + 1] * part

    def mean_with(self, steady: SteadyDepartures) -> ExpectedDepartures:
        """Return the mean of both forecasts, whose errors have different causes."""
        return replace(
            self,
            curve=tuple((count + steady.by(step * STEP_S)) / 2 for step, count in enumerate(self.curve)),
        )

    @property
    def last_rate(self) -> float:
        """Departures per second at the end of the curve."""
        return (self.curve[-1] - self.curve[-1 - LAST_STEPS]) / (LAST_STEPS * STEP_S)


def expected(model: BehaviorModel, spans: Sequence[SessionSpan]) -> ExpectedDepartures | None:
    """Return the departures that the behavior of the live sessions lets expect.

    None with one class of behavior, or if no session holds a slot: then the rate of the last minutes counts.
    A slot that becomes free is taken by a session like those that came lately, as in a full pool.
    """
    holding = [span for span in spans if span.holds_slot and span.left_ago_s is None]
    if len(model.classes) < 2 or not holding:
        return None
    groups = Counter((model.live[span.session], _rounded(span.age_s)) for span in holding)
    present = [
        math.fsum(
            count * model.classes[place].stays.leaves(age_s, step * STEP_S)
            for (place, age_s), count in sorted(groups.items())
        )
        for step in range(STEPS + 1)
    ]
    newcomer = newcomer_leaves(model, spans)
    curve, rises = [0.0], [0.0]
    for step in range(1, STEPS + 1):
        again = math.fsum(rises[at] * newcomer[step - at] for at in range(1, step))
        curve.append(max(present[step] + again, curve[-1]))
        rises.append(curve[-1] - curve[-2])
    return ExpectedDepartures(tuple(curve))


def _rounded(age_s: float) -> float:
    """Round an age, so that many sessions have the same: to whole steps, from 100 s on to its first digit."""
    unit_s = max(STEP_S, 10.0 ** math.floor(math.log10(max(age_s, 1.0))))
    return unit_s * round(age_s / unit_s)


def newcomer_leaves(model: BehaviorModel, spans: Sequence[SessionSpan]) -> list[float]:
    """Return the probability that a new session has left after 0, 1, 2, … steps."""
    weights = [0.0] * len(model.classes)
    by_tenant = {
        tenant: nearest(prior.features(0.0, 0.0, 0.0), model.centers)
        for tenant, prior in model.priors.tenants.items()
    }
    for span in spans:
        # A session counts less the longer ago it was created.
        weights[by_tenant[span.tenant]] += 0.5 ** (span.created_ago_s / NEWCOMERS_S)
    total = math.fsum(weights) or 1.0
    return [
        math.fsum(
            weight / total * one.newcomers.leaves(0.0, step * STEP_S)
            for weight, one in zip(weights, model.classes, strict=True)
        )
        for step in range(STEPS + 1)
    ]
