"""The class that computes next, and what is measured of all: two engines on one thread, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.test_engine_classes import BOTH, engines
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.forwarding import LEAVING_S
from turboserve.worker.engine.gather import GATHER_POLICIES
from turboserve.worker.service import commands
from turboserve.worker.service.class_drivers import ClassDrivers
from turboserve.worker.service.engine_commands import AdmitRequest
from turboserve.worker.service.packager import FromEngine, GeneratedChunk
from turboserve.worker.service.quality import MEASURE_S, SlackMeasured

LARGE, SMALL = BOTH.split(",")
STEP_S = 0.01


class Stepped:
    """The drivers of two classes, on a clock that goes on by `STEP_S` with each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.engines = engines(BOTH)
        self.delivered: list[FromEngine] = []
        self.forwards: list[str] = []
        policy = GATHER_POLICIES.make("step")
        self.drivers = ClassDrivers(
            self.engines, self.delivered.append, lambda: self.now, policy, (0.2, 2.0, 0.25)
        )
        self.drivers.carry_out(commands.GenerateUntil(math.inf))
        for engine in self.engines.values():
            self._watch(engine, monkeypatch)

    def _watch(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        compute = engine.forward.compute

        def watched(batch: Any) -> Any:
            self.forwards.extend(session.name for session in batch)
            return compute(batch)

        monkeypatch.setattr(engine.forward, "compute", watched)
        # The machine's speed decides nothing here.
        monkeypatch.setattr(engine.forward, "observe", lambda batch, seconds: None)

    def takes(self, model: str, forward_s: float) -> None:
        """Declare L(1) of a class."""
        profile = self.engines[model].forward.profile
        for _ in range(3):
            profile.observe(1, forward_s)
        assert profile(1) == forward_s

    def admit(self, session: str, model: str, waiting_s: float = 0.0) -> None:
        admit = commands.Admit(session, 1, 0, "a red circle", 7, 0, 10.0, model=model, waiting_s=waiting_s)
        self.drivers.carry_out(AdmitRequest(admit))

    def step(self) -> None:
        self.now += STEP_S
        for event in self.drivers.step():
            self.drivers.stamp(event)

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(1000):
            if done():
                return
            self.step()
        raise AssertionError("not within 1000 steps")

    def before_forwards(self) -> None:
        """Step until nothing but forwards is left to do."""
        self.until(lambda: not any(one.precedes_forward(self.now) for one in self.engines.values()))
        assert all(one.forward_candidates(self.now)[0] for one in self.engines.values())

    def chunks(self, session: str) -> list[GeneratedChunk]:
        return [
            one for one in self.delivered if isinstance(one, GeneratedChunk) and one.ready.session == session
        ]

    @property
    def measured(self) -> SlackMeasured:
        """The newest measurement."""
        return next(one for one in reversed(self.delivered) if isinstance(one, SlackMeasured))


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> Stepped:
    return Stepped(monkeypatch)


def test_a_session_that_leaves_its_slot_comes_before_those_of_other_classes(stepped: Stepped) -> None:
    stepped.admit("leaves", LARGE)
    stepped.admit("waits long", SMALL, waiting_s=1000.0)
    stepped.before_forwards()
    stepped.step()
    assert stepped.forwards == ["waits long"]
    stepped.drivers.carry_out(commands.Suspend("leaves", 1))
    stepped.step()
    assert stepped.forwards[1:] == ["waits long"]
    stepped.now += LEAVING_S + 1
    stepped.step()
    assert stepped.forwards[2:] == ["leaves"]


def test_a_begun_chunk_of_a_fast_class_keeps_its_turn(stepped: Stepped) -> None:
    """The slow class's time counts for no forward of the fast one, which would push the chunk back by it."""
    slow_s, fast_s = 0.4, 0.1
    stepped.takes(LARGE, slow_s)
    stepped.takes(SMALL, fast_s)
    forwards = stepped.engines[SMALL].config.chunk_forwards
    # Without any wait, the credit of the slow class's viewer would be 3 chunks of the slow class, less 3 of
    # the fast one, above that of the fast class's viewer. With it, this one comes first by half a second.
    ahead_s = 3 * forwards * (slow_s - fast_s)
    stepped.admit("slow", LARGE, waiting_s=ahead_s - 0.5)
    stepped.admit("fast", SMALL)
    stepped.before_forwards()
    stepped.until(lambda: len(stepped.chunks("fast")) == 1)
    assert stepped.forwards[: forwards - 1] == ["fast"] * (forwards - 1)


def test_what_was_measured_of_sessions_that_have_left_is_gone(
    stepped: Stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = {LARGE: 1, SMALL: 3}
    for model, engine in stepped.engines.items():
        monkeypatch.setattr(engine, "expected_late", lambda now, model=model: late[model])
    stepped.admit("stays", LARGE)
    stepped.admit("leaves", SMALL)
    stepped.until(lambda: bool(stepped.chunks("stays") and stepped.chunks("leaves")))
    stepped.now += MEASURE_S
    stepped.step()
    assert stepped.measured.late == 4
    assert stepped.measured.sessions.keys() == {"stays", "leaves"}
    stepped.drivers.carry_out(commands.Evict("leaves", 1))
    stepped.now += MEASURE_S
    stepped.step()
    assert stepped.measured.late == 1
    assert stepped.measured.sessions.keys() == {"stays"}


def test_a_measurement_of_one_class_has_no_session_of_another_that_has_just_left(stepped: Stepped) -> None:
    stepped.admit("stays", LARGE)
    stepped.until(lambda: len(stepped.chunks("stays")) == 1)
    stepped.admit("leaves", SMALL)
    stepped.now += MEASURE_S
    stepped.step()
    assert stepped.measured.sessions.keys() == {"stays", "leaves"}
    stepped.drivers.carry_out(commands.Evict("leaves", 1))
    stepped.delivered.clear()
    stepped.now += MEASURE_S
    stepped.step()
    measured = [one for one in stepped.delivered if isinstance(one, SlackMeasured)]
    # One of each class.
    assert [one.sessions.keys() for one in measured] == [{"stays"}, {"stays"}]


def test_a_chunk_is_no_reference_if_another_class_has_computed_within_its_time(stepped: Stepped) -> None:
    stepped.admit("measured", SMALL)
    stepped.until(lambda: bool(stepped.forwards))
    stepped.admit("between", LARGE, waiting_s=1000.0)
    stepped.until(lambda: len(stepped.chunks("between")) == 1)
    assert not stepped.chunks("measured")
    stepped.drivers.carry_out(commands.Evict("between", 1))
    stepped.until(lambda: len(stepped.chunks("measured")) == 2)
    assert [one.sample is not None for one in stepped.chunks("measured")] == [False, True]
