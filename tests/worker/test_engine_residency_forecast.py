"""Forecasts of sessions in host memory: their next chunk counts with the time of their return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.test_engine_residency import PROFILES, chunks_of, play, play_on, spec
from turboserve.worker.engine.activity import Offloaded
from turboserve.worker.engine.interface import Control

MakeDriver = Callable[..., Any]
OUT_S, IN_S = 0.2, 0.3


@pytest.fixture
def waiting(make_driver: MakeDriver) -> Any:
    """One slab, two sessions, and copies that take a known time. `a` is outside."""
    driver = make_driver(
        slabs=1, host_sessions=1, profiles=PROFILES, max_batch=1, max_lead_s=2.0, playhead_trust_s=1e9
    )
    engine = driver.engine
    for seed, name in enumerate("ab"):
        engine.admit(spec(name, seed), driver.now)
    play(driver, ["a", "b"], 3.0)
    while engine.sessions["a"].has_slab:
        play_on(driver, "ab")
    # Until here, forwards took no time.
    for size, seconds in PROFILES["forward"].items():
        engine.forward.profile._set(size, seconds)
    table, controller = engine._table, engine.residency
    controller._copy_out_s, controller._copy_in_s = OUT_S, IN_S
    transfers = table.host_transfers
    offload, bring_back, forward = transfers.offload, table.bring_back, engine.backend.forward

    def slow_offload(session: Any, now: float) -> None:
        driver.now += OUT_S
        offload(session, now)

    def slow_return(session: Any) -> None:
        driver.now += IN_S
        bring_back(session)

    def slow_forward(works: Any) -> Any:
        driver.now += PROFILES["forward"][1]
        return forward(works)

    transfers.offload, table.bring_back, engine.backend.forward = slow_offload, slow_return, slow_forward
    return driver


def test_the_forecast_of_a_session_outside_is_what_happens(waiting: Any) -> None:
    """Incident: a session in host memory was expected at once, however long its return took."""
    engine = waiting.engine
    assert isinstance(engine.sessions["a"].activity, Offloaded)
    # The device was busy elsewhere until the viewer had nothing left to play. The other one has paused.
    engine.playhead("b", engine.sessions["b"].playhead.position_s, now=waiting.now, playing=False)
    waiting.now += engine.playouts(waiting.now)["a"].slack_s
    began, found = waiting.now, engine.playouts(waiting.now)["a"]
    while not chunks_of(waiting.engine.step(waiting.now), "a"):
        pass
    late_s = waiting.now - began - found.slack_s
    assert late_s >= OUT_S + IN_S + 4 * PROFILES["forward"][1]
    assert found.lateness_s == pytest.approx(late_s, abs=0.05)


def test_a_session_outside_counts_in_the_deficit(waiting: Any) -> None:
    engine = waiting.engine

    def load(name: str) -> Any:
        streams = engine.fidelity.load(list(engine.sessions.values()), waiting.now).streams
        return next(each for each in streams if each.session == name)

    assert load("a").slack_s == pytest.approx(engine.playouts(waiting.now)["a"].slack_s)
    assert (load("a").returns_s, load("b").returns_s) == (pytest.approx(OUT_S + IN_S), 0.0)
    assert engine.expected_late(waiting.now) == 0
    # With 0.3 s left, five forwards of 0.01 s are in time, and the return is not.
    at = waiting.now + engine.playouts(waiting.now)["a"].slack_s - 0.3
    engine.playhead("b", 0.0, now=at, playing=False)
    assert engine.expected_late(at) >= 1


def test_a_prompt_of_a_session_outside_counts_after_its_return(waiting: Any) -> None:
    engine = waiting.engine
    engine.text.profile._set(1, 0.07)
    engine.control("a", Control(1, prompt="a blue square"))
    streams = engine.fidelity.load(list(engine.sessions.values()), waiting.now).streams
    found = next(each for each in streams if each.session == "a")
    assert found.returns_s == pytest.approx(OUT_S + IN_S + 0.07)
    assert found.context_s > 0


def test_a_session_that_does_not_return_is_left_out(waiting: Any) -> None:
    engine = waiting.engine
    assert engine.residency.returns_s(waiting.now) == {"a": pytest.approx(OUT_S + IN_S)}
    engine.sessions["a"].suspending = True
    assert engine.residency.returns_s(waiting.now) == {}
