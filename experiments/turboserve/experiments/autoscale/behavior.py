"""Whether what is learned of sessions' behavior improves forecasts of departures and of active sessions.

The arrivals are those of the Azure trace. A pool of fixed size refuses sessions while it is full. At
a refusal, admission forecasts when slots become free: by the departures of the last minutes, or by behavior.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turboserve.autoscaler.control.workload import Forecast
from turboserve.experiments.autoscale.departure_times import DepartureTimes, SteadyTimes, expected_times
from turboserve.experiments.autoscale.production import STAY_S, requests
from turboserve.state_store.core.behavior_classes import BehaviorModel
from turboserve.state_store.core.behavior_learner import BehaviorLearner
from turboserve.state_store.core.departures import STEP_S, SteadyDepartures, newcomer_leaves
from turboserve.state_store.core.forecast import WINDOW_S as COUNTED_S
from turboserve.state_store.core.session_spans import WINDOW_S, SessionTimes

EVERY = 16
"""Each 16th request is a session, so that about 50 are there at once. The first one distinguishes samples."""
SAMPLES = (3, 7, 11)
"""First requests of the measured samples. The constants of the estimates were chosen on samples 0 to 2."""
RENEWED_S = 15.0
SETTLES_S = 600.0
"""No forecast before this time counts, seconds."""
REFUSALS_S = 5.0
"""Refusals that follow each other within this time count once, seconds."""
FULL = 0.8
"""Slots of the pool as a share of the mean number of sessions that an unlimited pool has."""
SLOTS = (1, 5, 20)
"""Numbers of slots whose time is forecast."""
HORIZONS_S = (10, 60, 120)
CONTEXT_TOKENS = 512
"""Context tokens of a request for each prompt of its session."""


@dataclass(frozen=True)
class TracedSession:
    """One session of a trace."""

    name: str
    tenant: str
    begins_s: float
    stay_s: float
    prompts_s: tuple[float, ...]
    """Ages at which its prompt changes, rising."""
    share: float
    """Share of its stay in which it generates."""

    @property
    def ends_s(self) -> float:
        return self.begins_s + self.stay_s

    def times(self, now: float) -> SessionTimes:
        """Return what its row would say."""
        ended = self.ends_s <= now
        age_s = min(now, self.ends_s) - self.begins_s
        changes, chunks = bisect_right(self.prompts_s, age_s), int(self.share * age_s)
        left_at = self.ends_s if ended else None
        return SessionTimes(self.name, self.tenant, self.begins_s, left_at, changes, chunks, not ended, ended)


@dataclass(frozen=True)
class Kind:
    """What a tenant's sessions do."""

    tenant: str
    stay_s: float
    prompt_s: float
    share: float


KINDS = (
    Kind("preview", 45.0, 60.0, 1.0),
    Kind("story", 150.0, 12.0, 0.9),
    Kind("installation", 600.0, 240.0, 0.6),
)
"""Declared, not measured."""
MIXES = ((0.6, 0.3, 0.1), (0.2, 0.3, 0.5), (0.1, 0.7, 0.2), (0.7, 0.2, 0.1))
"""Shares of the tenants' arrivals in successive quarters of an hour."""
MIX_S = 900.0


def by_tokens(first: int) -> list[TracedSession]:
    """Return sessions of one tenant that stay in proportion to generated tokens.

    Each has a prompt for each CONTEXT_TOKENS of its request's context, at uniform times of its stay.
    """
    source, rows = random.Random(f"tokens {first}"), requests()
    mean = sum(generated for _, generated, _ in rows) / len(rows)
    found = []
    for number, (at, generated, context) in enumerate(rows[first::EVERY]):
        stay_s = STAY_S * max(generated, 1) / mean
        prompts_s = sorted(stay_s * source.random() for _ in range(round(context / CONTEXT_TOKENS)))
        found.append(TracedSession(f"s{number:05d}", "all", at, stay_s, tuple(prompts_s), 1.0))
    return found


def by_tenants(first: int, *, alike: bool = False) -> list[TracedSession]:
    """Return sessions of three declared tenants in changing mixes.

    A stay and a mean time between prompts are log-normal around the tenant's (σ 0.7 and 0.3). Prompts are a
    Poisson process. With `alike`, every session behaves as those of the second tenant.
    """
    source = random.Random(f"behavior {first}")
    found = []
    for number, (at, _, _) in enumerate(requests()[first::EVERY]):
        mix = MIXES[int(at / MIX_S) % len(MIXES)]
        kind = source.choices(KINDS, mix)[0]
        does = KINDS[1] if alike else kind
        stay_s = does.stay_s * source.lognormvariate(-0.245, 0.7)
        prompt_s = does.prompt_s * source.lognormvariate(-0.045, 0.3)
        prompts_s = _poisson(source, 1 / prompt_s, stay_s)
        found.append(TracedSession(f"s{number:05d}", kind.tenant, at, stay_s, prompts_s, does.share))
    return found


def _poisson(source: random.Random, rate: float, lasts_s: float) -> tuple[float, ...]:
    at_s, found = source.expovariate(rate), []
    while at_s < lasts_s:
        found.append(at_s)
        at_s += source.expovariate(rate)
    return tuple(found)


TRACES: dict[str, Callable[[int], list[TracedSession]]] = {
    "tokens": by_tokens,
    "tenants": by_tenants,
    "alike": lambda first: by_tenants(first, alike=True),
}


@dataclass
class Errors:
    """Absolute errors of the two forecasts of the same thing."""

    steady: list[float] = field(default_factory=list)
    behavior: list[float] = field(default_factory=list)

    def add(self, actual: float, steady: float, behavior: float) -> None:
        self.steady.append(abs(actual - steady))
        self.behavior.append(abs(actual - behavior))

    def figures(self) -> dict[str, float]:
        """Return the mean of each, and how much less the second one is."""
        if not self.steady:
            return {"forecasts": 0}
        means = [math.fsum(errors) / len(errors) for errors in (self.steady, self.behavior)]
        return {
            "forecasts": len(self.steady),
            "steady": round(means[0], 2),
            "behavior": round(means[1], 2),
            "less_percent": round(100 * (1 - means[1] / means[0]), 1) if means[0] else 0.0,
        }


class Knowledge:
    """What the state store would know: it learns from the sessions that a pool has taken."""

    def __init__(self) -> None:
        self.at = -math.inf
        self.classes: list[int] = []
        self.learner = BehaviorLearner()

    def departures(self, taken: Sequence[TracedSession], now: float) -> tuple[DepartureTimes, DepartureTimes]:
        """Return the times of departures that are expected without and with behavior."""
        left = sum(now - COUNTED_S < one.ends_s <= now for one in taken)
        steady = SteadyDepartures(left / COUNTED_S)
        if now - self.at >= RENEWED_S:
            since = max(now - WINDOW_S, 0.0)
            self.learner.renew((one.times(now) for one in taken if one.ends_s > since), since, steady, now)
            self.at = now
            self.classes.append(len(self.model.classes))
        times = SteadyTimes(steady)
        return times, expected_times(self.learner, now - self.at) or times

    @property
    def model(self) -> BehaviorModel:
        assert self.learner.model is not None
        return self.learner.model


def refusals(visits: Sequence[TracedSession], lasts_s: float) -> dict[str, Any]:
    """Compare the forecasts at the refusals of a pool that is smaller than its demand."""
    slots = round(FULL * math.fsum(one.stay_s for one in visits) / visits[-1].begins_s)
    taken: list[TracedSession] = []
    asked: list[float] = []
    ends: list[float] = []
    known = Knowledge()
    forecasts: list[tuple[float, DepartureTimes, DepartureTimes]] = []
    for visit in visits:
        now = visit.begins_s
        if now >= lasts_s:
            break
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        if len(ends) < slots:
            taken.append(visit)
            heapq.heappush(ends, visit.ends_s)
        elif now >= SETTLES_S and (not asked or now - asked[-1] >= REFUSALS_S):
            asked.append(now)
            forecasts.append((now, *known.departures(taken, now)))
    departed = sorted(one.ends_s for one in taken)
    errors = {count: Errors() for count in SLOTS}
    for now, *both in forecasts:
        for count in SLOTS:
            place = bisect_right(departed, now) + count - 1
            one, other = (each.time_of(count) for each in both)
            if place < len(departed) and departed[place] < lasts_s and one is not None and other is not None:
                errors[count].add(departed[place] - now, one, other)
    return {
        "slots": slots,
        "several_classes_percent": _percent_above_one(known.classes),
        "error_s": {f"{count}_slots": found.figures() for count, found in errors.items()},
    }


def active_sessions(visits: Sequence[TracedSession], lasts_s: float) -> dict[str, Any]:
    """Compare forecasts of the number of sessions in a pool without limit.

    `steady` is the autoscaler's forecast without its margin. `behavior` subtracts the expected departures of
    the sessions that are there, and adds those that come at the rate of the last minutes.
    """
    changes = sorted([(one.begins_s, 1) for one in visits] + [(one.ends_s, -1) for one in visits])
    counts, place, now_there = [], 0, 0
    for second in range(int(lasts_s)):
        while place < len(changes) and changes[place][0] <= second:
            now_there, place = now_there + changes[place][1], place + 1
        counts.append(now_there)
    product = {horizon: Forecast(float(horizon), 0.5) for horizon in HORIZONS_S}
    errors = {horizon: Errors() for horizon in HORIZONS_S}
    begins = [one.begins_s for one in visits]
    known = Knowledge()
    for second, count in enumerate(counts):
        for forecast in product.values():
            forecast.observe(count, float(second))
        if second < SETTLES_S or second % int(RENEWED_S):
            continue
        now, there = float(second), bisect_right(begins, second)
        known.departures(visits[:there], now)
        model, newcomer = known.model, newcomer_leaves(known.model, known.learner.spans)
        live = [one for one in visits[:there] if one.ends_s > now]
        rate = (there - bisect_right(begins, now - COUNTED_S)) / COUNTED_S
        for horizon in HORIZONS_S:
            if second + horizon >= len(counts):
                continue
            plain = product[horizon].plain
            assert plain is not None
            leave = math.fsum(
                model.classes[model.live[one.name]].stays.leaves(now - one.begins_s, horizon) for one in live
            )
            steps = round(horizon / STEP_S)
            # Of the sessions that come, those of the first step have the whole horizon to leave.
            come = STEP_S * rate * math.fsum(1 - newcomer[step] for step in range(steps))
            found = count - leave + come if len(model.classes) > 1 else plain
            errors[horizon].add(counts[second + horizon], plain, found)
    return {f"{horizon}_s": found.figures() for horizon, found in errors.items()}


def behavior_case(name: str, lasts_s: float) -> dict[str, Any]:
    """Measure the forecasts on samples of one kind of trace."""
    found: dict[str, Any] = {}
    for first in SAMPLES:
        visits = TRACES[name](first)
        found[f"sample_{first}"] = {
            "refusals": refusals(visits, lasts_s),
            "active_sessions": active_sessions(visits, lasts_s),
        }
    return found


def _percent_above_one(classes: Sequence[int]) -> float:
    return round(100 * sum(count > 1 for count in classes) / max(len(classes), 1), 1)
