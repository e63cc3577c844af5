"""The choice of the sessions that leave their slabs and return: rules, and properties under random loads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turboserve.worker.engine.residency import (
    Decision,
    NoExchange,
    Offload,
    ResidencyOptions,
    ResidencyView,
    Return,
    decide,
    returns_s,
)

OPTIONS = ResidencyOptions(copy_out_s=0.05, copy_in_s=0.05, least_residence_s=0.3, least_gain_s=0.4)


def resident(name: str, credit_s: float, **rest: object) -> ResidencyView:
    made = ResidencyView(name, True, credit_s, credit_s, wants=False, resident_s=10.0)
    return replace(made, **rest)  # type: ignore[arg-type]


def outside(name: str, credit_s: float, **rest: object) -> ResidencyView:
    made = ResidencyView(name, False, credit_s, credit_s, wants=True)
    return replace(made, **rest)  # type: ignore[arg-type]


def waits(decision: Decision) -> float:
    assert isinstance(decision, NoExchange)
    return decision.seconds


def test_nothing_moves_while_every_session_has_a_slab() -> None:
    assert decide([resident("a", 1.0), resident("b", 2.0)], 0, OPTIONS) == NoExchange(inf)


def test_the_resident_of_the_highest_credit_leaves() -> None:
    views = [resident("a", 1.5), resident("b", 3.0), resident("c", 2.0), outside("d", 0.05)]
    assert decide(views, 0, OPTIONS) == Offload("b", "d")


def test_a_free_slab_goes_to_the_session_that_must_return_first() -> None:
    assert decide([outside("a", 1.0), outside("b", 0.5)], 1, OPTIONS) == Return("b")


def test_a_session_stays_for_its_least_residence() -> None:
    views = [resident("a", 3.0, resident_s=0.1), outside("b", 0.0)]
    assert waits(decide(views, 0, OPTIONS)) == pytest.approx(0.2)


def test_a_session_without_enough_credit_more_stays() -> None:
    views = [resident("a", 0.9), outside("b", 0.6)]
    assert isinstance(decide(views, 0, OPTIONS), NoExchange)


def test_a_session_that_would_return_late_stays() -> None:
    views = [resident("a", 3.0, return_by_s=0.2), outside("b", 0.0)]
    assert isinstance(decide(views, 0, OPTIONS), NoExchange)


def test_a_session_in_a_migration_a_loan_or_a_rebuild_stays() -> None:
    views = [resident("a", 3.0, movable=False), resident("b", 2.0), outside("c", 0.0)]
    assert decide(views, 0, OPTIONS) == Offload("b", "c")


def test_a_late_session_makes_another_one_less_late_than_itself() -> None:
    views = [resident("a", 3.0, return_by_s=0.2), outside("b", 0.0, late_s=0.55)]
    assert isinstance(decide(views, 0, OPTIONS), NoExchange)
    assert decide([views[0], replace(views[1], late_s=1.0)], 0, OPTIONS) == Offload("a", "b")


def test_a_session_without_urgency_replaces_only_an_idle_one() -> None:
    busy, guest = resident("a", 5.0, wants=True), outside("b", 2.0)
    assert isinstance(decide([busy, guest], 0, OPTIONS), NoExchange)
    assert decide([replace(busy, wants=False), guest], 0, OPTIONS) == Offload("a", "b")


def test_returns_begin_early_enough_for_all_that_share_the_copies() -> None:
    """Three returns of 0.1 s each that are all due in 0.3 s: the first begins now."""
    guests = [outside(name, 1.0, return_by_s=0.25, wants=False) for name in "abc"]
    busy = [resident("r", 5.0, wants=True)]
    assert isinstance(decide([*busy, *guests], 0, OPTIONS), Offload)
    assert waits(decide([*busy, guests[0]], 0, OPTIONS)) == pytest.approx(0.2)


def test_sessions_return_in_their_order_after_the_copy_in_progress() -> None:
    """A free slab needs one copy of 0.05 s, a taken one two."""
    turns = [(2.0, "c"), (0.5, "a"), (1.0, "b")]
    assert returns_s(turns, 0, OPTIONS) == pytest.approx({"a": 0.1, "b": 0.2, "c": 0.3})
    assert returns_s(turns, 1, OPTIONS, 0.02) == pytest.approx({"a": 0.07, "b": 0.17, "c": 0.27})
    assert returns_s([], 1, OPTIONS) == {}


@dataclass
class Viewer:
    """A viewer that plays, and the session that generates for it."""

    name: str
    slack_s: float
    resident: bool = False
    since_s: float = 0.0
    left_s: float = 0.0
    """Rest of the chunk in work."""
    moving: bool = False
    overdue_since: float | None = None
    chunks: int = 0
    stalls_s: float = 0.0


@dataclass
class World:
    """One device and one copy at a time, in steps of 5 ms; the device serves the least credit first."""

    slabs: int
    viewers: list[Viewer]
    chunk_s: float
    options: ResidencyOptions
    lead_s: float = 3.0
    media_s: float = 0.75
    tick_s: float = 0.005
    now: float = 0.0
    copy: tuple[Viewer, str, float] | None = None
    leaving: Viewer | None = None
    """Chosen to leave, at its next boundary."""
    arrivals: list[float] = field(default_factory=list)

    def view(self, one: Viewer) -> ResidencyView:
        by_s = one.slack_s - self.options.copy_in_s - 2 * self.chunk_s
        if one.resident or by_s > 0:
            one.overdue_since = None
        elif one.overdue_since is None:
            one.overdue_since = self.now
        return ResidencyView(
            one.name,
            one.resident,
            one.slack_s - one.left_s - self.chunk_s,
            by_s,
            wants=one.left_s > 0 or one.slack_s < self.lead_s,
            late_s=0.0 if one.overdue_since is None else self.now - one.overdue_since,
            resident_s=self.now - one.since_s,
        )

    def step(self) -> None:
        self.now += self.tick_s
        for one in self.viewers:
            one.slack_s -= self.tick_s
            if one.slack_s < 0:
                one.stalls_s, one.slack_s = one.stalls_s - one.slack_s, 0.0
        self._copies()
        ready = [one for one in self.viewers if one.resident and not one.moving]
        begun = [one for one in ready if one.left_s > 0]
        able = begun or [one for one in ready if one.slack_s < self.lead_s and one is not self.leaving]
        if able:
            chosen = min(able, key=lambda one: one.slack_s)
            if chosen.left_s <= 0:
                chosen.left_s = self.chunk_s
            chosen.left_s -= self.tick_s
            if chosen.left_s <= 1e-9:
                chosen.left_s, chosen.chunks = 0.0, chosen.chunks + 1
                chosen.slack_s += self.media_s
        used = sum(one.resident for one in self.viewers) + (self.copy is not None and self.copy[1] == "in")
        assert used <= self.slabs, "two sessions in a slab"

    def _copies(self) -> None:
        if self.copy is not None:
            one, way, left_s = self.copy
            if left_s - self.tick_s > 1e-9:
                self.copy = one, way, left_s - self.tick_s
                return
            one.resident, one.moving, self.copy = way == "in", False, None
            if way == "in":
                one.since_s = self.now
                self.arrivals.append(self.now)
        if self.leaving is not None:
            if self.leaving.left_s <= 0:
                self.copy, self.leaving.moving = (self.leaving, "out", self.options.copy_out_s), True
                self.leaving = None
            return
        free = self.slabs - sum(one.resident for one in self.viewers)
        match decide([self.view(one) for one in self.viewers], free, self.options):
            case Return(name):
                one = self._of(name)
                assert not one.resident
                assert free > 0
                self.copy, one.moving = (one, "in", self.options.copy_in_s), True
            case Offload(name):
                one = self._of(name)
                assert one.resident
                assert self.now - one.since_s >= self.options.least_residence_s - 1e-9
                self.leaving = one
            case NoExchange():
                pass

    def _of(self, name: str) -> Viewer:
        return next(one for one in self.viewers if one.name == name)


def world(slabs: int, sessions: int, chunk_s: float, copy_s: float, slacks: list[float]) -> World:
    options = ResidencyOptions(
        copy_s, copy_s, least_residence_s=max(4 * copy_s, chunk_s), least_gain_s=max(4 * copy_s, 0.375)
    )
    viewers = [Viewer(f"v{n}", slacks[n % len(slacks)], resident=n < slabs) for n in range(sessions)]
    return World(slabs, viewers, chunk_s, options)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_session_is_in_time_where_device_and_copies_permit_it(data: st.DataObject) -> None:
    slabs = data.draw(st.integers(1, 4))
    sessions = slabs + data.draw(st.integers(1, 4))
    # Half of the device, and at most a third of the time of the copies at one exchange for each second.
    chunk_s = 0.5 * 0.75 / sessions * data.draw(st.floats(0.3, 1.0))
    copy_s = min(0.15, 0.16 / sessions) * data.draw(st.floats(0.1, 1.0))
    slacks = data.draw(st.lists(st.floats(2.0, 3.0), min_size=1, max_size=8))
    scene = world(slabs, sessions, chunk_s, copy_s, slacks)
    for _ in range(4000):
        scene.step()
    assert [one.name for one in scene.viewers if one.stalls_s > 0] == []
    _check_swaps(scene)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_session_starves_under_overload(data: st.DataObject) -> None:
    """The device cannot serve all in time: each still gets its turn, and exchanges stay bounded."""
    slabs = data.draw(st.integers(1, 3))
    sessions = slabs + data.draw(st.integers(1, 4))
    chunk_s = 0.75 / sessions * data.draw(st.floats(1.0, 2.0))
    scene = world(slabs, sessions, chunk_s, data.draw(st.floats(0.01, 0.1)), [0.0, 1.0, 2.0])
    for _ in range(6000):
        scene.step()
    made = [one.chunks for one in scene.viewers]
    assert min(made) >= 0.25 * max(made), made
    _check_swaps(scene)


def _check_swaps(scene: World) -> None:
    """Each arrival keeps its slab for the least residence: that bounds arrivals in any time."""
    window_s = 5.0
    bound = scene.slabs * (window_s / scene.options.least_residence_s + 1)
    for at in scene.arrivals:
        assert sum(at <= other < at + window_s for other in scene.arrivals) <= bound
