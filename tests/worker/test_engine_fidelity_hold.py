"""How often a session's configuration changes: bounded by the hold, under any load."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.fidelity_world import CHUNK_S, LADDER, wide_load
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_forecast import EngineLoad, StreamLoad
from turboserve.worker.engine.fidelity_in_time import HOLD_S, LeastLossInTime
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import ChunkReady, SessionSpec
from turboserve.worker.model.config import ModelConfig

MINUTE_S = 60.0
Places = Sequence[tuple[float, int]]
"""When each chunk of a session began, and at which place of the ladder."""


def most_changes(rungs: int) -> int:
    """Largest number of changes within a minute.

    Two raises are at least `HOLD_S` apart. Before, between and after them, a configuration falls at most once
    to each lower rung.
    """
    raises = int(MINUTE_S / HOLD_S)
    return raises + (raises + 1) * (rungs - 1)


def check_hold(places: Places, rungs: int) -> int:
    """Assert the bound for each minute. Returns the largest number of changes within one."""
    changes = [
        (at, after - before) for (_, before), (at, after) in itertools.pairwise(places) if after != before
    ]
    raises = [at for at, change in changes if change < 0]
    assert all(after - before >= HOLD_S - 1e-9 for before, after in itertools.pairwise(raises))
    counts = [sum(start <= at < start + MINUTE_S - 1e-6 for at, _ in changes) for start, _ in changes]
    assert max(counts, default=0) <= most_changes(rungs)
    return max(counts, default=0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**9), st.floats(0.05, 2.0))
def test_changes_within_a_minute_are_bounded_under_any_load(seed: int, step_s: float) -> None:
    """The load is another one at each boundary: other sessions, another slack, another speed."""
    rng = random.Random(seed)
    policy, count = LeastLossInTime(), len(LADDER.rungs)
    now, place, raised_at, places = 0.0, 0, -1e9, [(0.0, 0)]
    lowest = rng.randint(1, count - 1)
    for _ in range(200):
        now += step_s * rng.uniform(0.5, 1.5)
        load = replace(wide_load(rng), ladder=LADDER)
        others = [replace(each, place=0, held_place=None, lowest=count - 1) for each in load.streams[1:16]]
        own = replace(load.streams[0], place=place, held_place=None, lowest=lowest, starts=False)
        own = replace(own, raised_s=now - raised_at)
        chosen = policy.choose(own.session, replace(load, streams=[own, *others]))
        if chosen < place:
            raised_at = now
        place = chosen
        places.append((now, place))
    check_hold(places, lowest + 1)


def test_the_bound_is_tested_with_loads_that_change_a_configuration_often() -> None:
    """A load that alternates between idle and hopeless makes the session fall and rise at each hold."""
    policy, rungs = LeastLossInTime(), len(LADDER.rungs)
    own = StreamLoad("s", 3.0, lead_s=3.0, lowest=rungs - 1)
    place, raised_at, places = 0, -1e9, [(0.0, 0)]
    for number in range(300):
        now, hopeless = 0.5 * number, number % 2 == 0
        stream = replace(
            own,
            slack_s=-1.0 if hopeless else 3.0,
            place=place,
            raised_s=now - raised_at,
        )
        load = EngineLoad(LADDER, LatencyProfile({1: 0.02}), 0.0, CHUNK_S, [stream])
        chosen = policy.choose("s", load)
        if chosen < place:
            raised_at = now
        place = chosen
        places.append((now, place))
    assert check_hold(places, rungs) >= 2 * int(MINUTE_S / HOLD_S) - 1


def test_the_engine_keeps_the_bound_on_a_device_whose_speed_changes(
    make_driver: Callable[..., Any], tiny_config: ModelConfig
) -> None:
    best = Fidelity.best(tiny_config)
    rungs = (Rung(best, 5.0, 1.0), Rung(replace(best, steps=2), 3.0, 0.95), Rung(Fidelity(1, 1), 2.0, 0.9))
    profiles = {"forward": {1: 0.02}, "decode": {1: 0.001}, "package": {1: 0.001}}
    driver = make_driver(
        slabs=2,
        profiles=profiles,
        ladder=FidelityLadder(rungs, 0.9),
        fidelity="in-time",
        max_lead_s=2.0,
        max_batch=1,
        playhead_trust_s=1e9,
    )
    engine, rng, names = driver.engine, random.Random(7), ("a", "b")
    forward, factor = engine.backend.forward, [1.0]

    def timed(works: Sequence[Any]) -> Any:
        seconds = 0.02 * factor[0] * len(works)
        driver.now += seconds
        engine.forward.profile._set(1, 0.02 * factor[0])
        return forward(works)

    engine.backend.forward = timed
    for seed, name in enumerate(names):
        engine.admit(SessionSpec(name, "a red circle", seed), driver.now)
    made: list[ChunkReady] = []
    position, end, turn_s = dict.fromkeys(names, 0.0), driver.now + 75.0, 0.0
    while driver.now < end:
        if driver.now >= turn_s:
            # From a quarter of the device's time to two and a half times.
            factor[0], turn_s = rng.choice([1.0, 4.0, 10.0]), driver.now + rng.uniform(1.0, 8.0)
        before = driver.now
        if engine.has_work(driver.now):
            made += [event for event in engine.step(driver.now) if isinstance(event, ChunkReady)]
        driver.now = max(driver.now, before + 0.02)
        for name in names:
            limit_s = engine.config.media_start(engine.sessions[name].delivered)
            position[name] = min(position[name] + driver.now - before, limit_s)
            engine.playhead(name, position[name], now=driver.now)
    most = []
    for name in names:
        # The first chunk is neither a fall nor a raise.
        chunks = [chunk for chunk in made if chunk.session == name and chunk.index]
        ladder = engine.fidelity.ladder
        places = [(chunk.timings.due_s, ladder.place(chunk.fidelity) or 0) for chunk in chunks]
        most.append(check_hold(places, len(rungs)))
    assert min(most) >= 2


@pytest.mark.parametrize("rungs", [2, 4])
def test_the_bound_of_the_documentation(rungs: int) -> None:
    """`HOLD_S` promises at most 60 / `HOLD_S` + 1 changes per rung and minute."""
    assert most_changes(rungs) <= (MINUTE_S / HOLD_S + 1) * rungs
