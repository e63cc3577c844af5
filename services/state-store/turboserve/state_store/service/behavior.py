"""What is learned of the behavior of each model's sessions, renewed from rows while admission needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from turboserve.clock import Clock
from turboserve.state_store import metrics
from turboserve.state_store.core.behavior_classes import SessionBehavior
from turboserve.state_store.core.behavior_learner import BehaviorLearner
from turboserve.state_store.core.departures import SteadyDepartures
from turboserve.state_store.core.forecast import WINDOW_S as COUNTED_S
from turboserve.state_store.core.forecast import Outlook
from turboserve.state_store.core.session_spans import WINDOW_S

RENEWED_AFTER_S = 15.0
"""Time from one request that reads rows to the next one, seconds."""
SHOWN_S = 600.0
"""Metrics show what is known for this long, seconds."""
MODELS = 64
"""Maximum number of models that are kept, those that were read last."""


@dataclass
class _Known:
    at: float
    """When rows were read last, by the monotonic clock."""
    learner: BehaviorLearner
    figures: Mapping[int, ClassFigures]
    """By class."""


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


class LearnedBehavior:
    """Keeps what is known of each model's sessions.

    All of it comes from rows, so a restart loses only hysteresis and the errors of past forecasts.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._asked_at: dict[str, float] = {}
        """Model → when rows were to be read last, by the monotonic clock."""
        for gauge, place in (
            (metrics.behavior_sessions, 0),
            (metrics.behavior_prompts, 1),
            (metrics.behavior_active_share, 2),
            (metrics.behavior_remaining_stay, 3),
        ):
            gauge.add(self, partial(LearnedBehavior.shown, place=place))
        metrics.behavior_forecast_error.add(self, LearnedBehavior.errors)

    def since(self, model: str) -> float | None:
        """Return from when on rows are to be read (Unix seconds). None: another request has read them lately.

        Of requests that come at once, one reads. If it fails, the next one is asked after `RENEWED_AFTER_S`.
        """
        now, asked_at = self._clock.monotonic(), self._asked_at.get(model)
        if asked_at is not None and now - asked_at < RENEWED_AFTER_S:
            return None
        self._asked_at.pop(model, None)
        self._asked_at[model] = now
        _keep_last(self._asked_at)
        return max(self._clock.wall() - WINDOW_S, 0.0)

    def learn(self, model: str, since: float, outlook: Outlook) -> None:
        """Learn from an outlook that was read with `since`."""
        known = self._known.pop(model, None)
        learner = known.learner if known is not None else BehaviorLearner()
        steady = SteadyDepartures(outlook.left / COUNTED_S)
        learner.renew(outlook.sessions or (), since, steady, self._clock.wall())
        self._known[model] = _Known(self._clock.monotonic(), learner, figures_of(learner))
        _keep_last(self._known)

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
            if now - known.at <= SHOWN_S and (part := known.learner.errors.part) is not None
        }


def _keep_last(by_model: dict[str, Any]) -> None:
    while len(by_model) > MODELS:
        del by_model[next(iter(by_model))]
