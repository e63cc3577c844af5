"""Learns the behavior of the sessions of full models from their rows, for metrics alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError
from turboserve.state_store import metrics
from turboserve.state_store.core.behavior_classes import SessionBehavior
from turboserve.state_store.core.behavior_learner import BehaviorLearner
from turboserve.state_store.core.departures import steady_departures
from turboserve.state_store.core.session_spans import WINDOW_S, SessionTimes
from turboserve.state_store.ports.database import Database

SHOWN_S = 600.0
"""Metrics show what is known for this long, seconds."""
MODELS = 64
"""Maximum number of models that are kept, those that were found full last."""

log = logs.get("behavior")


@dataclass
class _Known:
    at: float
    """When rows were read last, by the monotonic clock."""
    learner: BehaviorLearner
    figures: Mapping[int, ClassFigures]
    """By class."""
    forecast_error: float | None
    """Errors of the forecasts by behavior as a part of those without it. None: too few are known."""


class ClassFigures(NamedTuple):
    """The live sessions of a class, and the means of their estimates."""

    sessions: int
    prompts_per_hour: float
    active_share: float
    remaining_s: float


def figures_of(learner: BehaviorLearner) -> dict[int, ClassFigures]:
    """Return the figures of each class that has live sessions."""
    behavior = learner.model
    assert behavior is not None
    members: dict[int, list[SessionBehavior]] = {}
    for span in learner.spans:
        if span.left_ago_s is None:
            own = behavior.behavior(span)
            members.setdefault(own.behavior_class, []).append(own)
    return {
        index: ClassFigures(
            len(ones),
            3_600.0 * fmean(one.change_rate for one in ones),
            fmean(one.active_share for one in ones),
            fmean(one.remaining_s for one in ones),
        )
        for index, ones in members.items()
    }


def _renew(
    learner: BehaviorLearner, rows: Sequence[SessionTimes], since: float, at: float, now: float
) -> _Known:
    """Learn from rows that were read with `since`. `at`, `now`: see `_Known.at`, and Unix seconds."""
    learner.renew(rows, since, steady_departures(rows, now), now)
    return _Known(at, learner, figures_of(learner), learner.errors.part)


class LearnedBehavior:
    """Keeps what is known of the sessions of each model that admission has found full.

    All of it comes from rows, so a restart loses only hysteresis and the errors of past forecasts.
    """

    def __init__(self, database: Database, clock: Clock, interval_s: float) -> None:
        """`interval_s`: see `Settings.behavior_s`."""
        self._database, self._clock, self._interval_s = database, clock, interval_s
        self._known: Mapping[str, _Known] = {}
        """What is known of each model, in the order of reading. It is replaced, not changed: an exporter of
        metrics reads it on a thread of its own."""
        self._full: dict[str, None] = {}
        """Models that were found full since they were learned last, the last ones last."""
        for gauge, place in (
            (metrics.behavior_sessions, 0),
            (metrics.behavior_prompts, 1),
            (metrics.behavior_active_share, 2),
            (metrics.behavior_remaining_stay, 3),
        ):
            gauge.add(self, partial(LearnedBehavior.shown, place=place))
        metrics.behavior_forecast_error.add(self, LearnedBehavior.errors)

    def found_full(self, model: str) -> None:
        """Note that admission has found the model full. It is learned at the end of the interval."""
        self._full.pop(model, None)
        self._full[model] = None
        _keep_last(self._full)

    async def run(self) -> None:
        """Learn at intervals; never returns."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.renew()

    async def renew(self) -> None:
        """Learn each model that was found full, one after the other."""
        models, self._full = self._full, {}
        for model in models:
            try:
                await self._learn(model)
            except TurboServeError as error:
                log.warning("behavior not learned", model=model, error=error.detail)
            except Exception:
                # Only metrics depend on it.
                log.exception("behavior not learned", model=model)

    async def _learn(self, model: str) -> None:
        since = max(self._clock.wall() - WINDOW_S, 0.0)
        async with self._database.statement() as db:
            rows = await db.admission.session_times(model, since=since)
        if rows is None:
            # Too many live. Without their departures, past forecasts cannot be compared either.
            self._known = {name: one for name, one in self._known.items() if name != model}
            return
        known = self._known.get(model)
        learner = known.learner if known is not None else BehaviorLearner()
        # It takes too long for the event loop.
        renewed = await asyncio.to_thread(
            _renew, learner, rows, since, self._clock.monotonic(), self._clock.wall()
        )
        # The models that were read last, this one last.
        others = {name: one for name, one in self._known.items() if name != model}
        others[model] = renewed
        _keep_last(others)
        self._known = others

    def shown(self, place: int) -> Mapping[tuple[str, ...], float]:
        """Return one figure of `ClassFigures` for each model and class of behavior."""
        now, found = self._clock.monotonic(), dict[tuple[str, ...], float]()
        for model, known in self._known.items():
            if now - known.at <= SHOWN_S:
                for index, figures in known.figures.items():
                    found[model, str(index)] = figures[place]
        return found

    def errors(self) -> Mapping[str, float]:
        """Return for each model the errors of forecasts by behavior, as a part of those without it."""
        now = self._clock.monotonic()
        return {
            model: part
            for model, known in self._known.items()
            if now - known.at <= SHOWN_S and (part := known.forecast_error) is not None
        }


def _keep_last(by_model: dict[str, Any]) -> None:
    while len(by_model) > MODELS:
        del by_model[next(iter(by_model))]
