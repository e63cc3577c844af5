"""The behavior of full models' sessions is learned beside admission, and only metrics depend on it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.metrics import CallbackOptions

import turboserve.simulation.runtime.rows.admission
import turboserve.state_store.repository.behavior
from tests.helpers.waiting import LIMIT_S, eventually
from tests.state_store.conftest import StartStore
from tests.state_store.core_requests import REQUEST
from tests.state_store.state_store_harness import Harness
from turboserve.clock import SystemClock
from turboserve.contracts.errors import NoCapacityError
from turboserve.ids import new_id
from turboserve.state_store import metrics
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.behavior_learner import BehaviorLearner
from turboserve.state_store.core.session_spans import SessionTimes
from turboserve.state_store.ports.database import Database
from turboserve.state_store.service.behavior import LearnedBehavior
from turboserve.telemetry_names import BEHAVIOR, MODEL

SERVERS = ("memory",)


async def session_of(database: Database, model: str) -> None:
    request = REQUEST.model_copy(update={"id": new_id("ses"), "model": model})
    async with database.transaction() as db:
        await db.changes.create(rules.create(request, time.time()))


def learned_sessions(behavior: LearnedBehavior) -> dict[str, float]:
    """Return the number of live sessions of each model that is learned."""
    found = behavior.shown(0)
    return {model: sum(count for (one, _), count in found.items() if one == model) for model, _ in found}


async def test_only_models_that_were_found_full_are_learned(database: Database) -> None:
    behavior = LearnedBehavior(database, SystemClock(), 15.0)
    for model in ("full", "full", "other"):
        await session_of(database, model)
    behavior.found_full("full")
    # It waits for the end of the interval.
    assert learned_sessions(behavior) == {}
    await behavior.renew()
    assert learned_sessions(behavior) == {"full": 2}
    await session_of(database, "full")
    # It was not found full again.
    await behavior.renew()
    assert learned_sessions(behavior) == {"full": 2}
    behavior.found_full("full")
    behavior.found_full("other")
    await behavior.renew()
    assert learned_sessions(behavior) == {"full": 3, "other": 1}


async def test_nothing_is_learned_or_shown_while_too_many_sessions_live(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    behavior = await with_one_full(database)
    assert learned_sessions(behavior) == {"m": 1}
    too_many_live(monkeypatch)
    behavior.found_full("m")
    await behavior.renew()
    assert learned_sessions(behavior) == {}


async def test_what_a_thread_reads_for_metrics_does_not_change_meanwhile(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the exporter of OTLP has a thread of its own, and iterated over a dictionary that grew."""
    behavior = await with_one_full(database)
    read, before = behavior._known, dict(behavior._known)
    behavior.found_full("other")
    await behavior.renew()
    assert (dict(read), list(behavior._known)) == (before, ["m", "other"])
    read, before = behavior._known, dict(behavior._known)
    too_many_live(monkeypatch)
    behavior.found_full("m")
    await behavior.renew()
    assert (dict(read), list(behavior._known)) == (before, ["other"])


async def with_one_full(database: Database) -> LearnedBehavior:
    """Return what is learned of one session of model m, which was found full."""
    behavior = LearnedBehavior(database, SystemClock(), 15.0)
    await session_of(database, "m")
    behavior.found_full("m")
    await behavior.renew()
    return behavior


def too_many_live(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (turboserve.state_store.repository.behavior, turboserve.simulation.runtime.rows.admission):
        monkeypatch.setattr(module, "LIVE_LIMIT", 0)


async def test_the_event_loop_goes_on_while_behavior_is_learned(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ends = threading.Event(), threading.Event()
    learn_rows, ended = BehaviorLearner.renew, list[bool]()

    def waits(*arguments: Any) -> None:
        begun.set()
        # False: the event loop waits for this.
        ended.append(ends.wait(LIMIT_S))
        learn_rows(*arguments)

    monkeypatch.setattr(BehaviorLearner, "renew", waits)
    behavior = LearnedBehavior(database, SystemClock(), 15.0)
    behavior.found_full("m")
    learning = asyncio.create_task(behavior.renew())
    await eventually(begun.is_set)
    ends.set()
    await learning
    assert ended == [True]


async def test_an_error_of_one_model_leaves_the_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn_rows = BehaviorLearner.renew

    def fails_without_sessions(learner: BehaviorLearner, rows: Sequence[SessionTimes], *more: Any) -> None:
        if not rows:
            raise ZeroDivisionError
        learn_rows(learner, rows, *more)

    monkeypatch.setattr(BehaviorLearner, "renew", fails_without_sessions)
    behavior = LearnedBehavior(database, SystemClock(), 15.0)
    await session_of(database, "m")
    behavior.found_full("empty")
    behavior.found_full("m")
    await behavior.renew()
    assert learned_sessions(behavior) == {"m": 1}


async def test_metrics_show_the_behavior_of_a_model_after_a_refusal(start_store: StartStore) -> None:
    store = await start_store(behavior_s=0.05)
    model = new_id("m")
    async with Harness.connected(store.runtime.settings) as api:
        await api.worker(model, capacity=1)
        await api.create(model)
        with pytest.raises(NoCapacityError):
            await api.create(model)

    def shown() -> list[float | int]:
        """What the gauge of sessions exports for the model."""
        observed = metrics.behavior_sessions._observe(CallbackOptions())
        return [one.value for one in observed if one.attributes == {MODEL: model, BEHAVIOR: "0"}]

    await eventually(lambda: shown() == [1.0])
