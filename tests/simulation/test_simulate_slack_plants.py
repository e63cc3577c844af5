"""Planted faults of the mechanisms of playout slack: each of their checks can fail."""

from __future__ import annotations

import pytest

from tests.simulation.simulate_plants import is_found, violations
from turboserve.autoscaler.control import advisor
from turboserve.scheduler.migrations import Migrations
from turboserve.scheduler.placement.pool import PoolEntry
from turboserve.scheduler.view import View
from turboserve.simulation import command
from turboserve.simulation.faults import CALM
from turboserve.simulation.mechanisms import Mechanisms, with_mechanisms
from turboserve.simulation.scenario import run_scenario, scale_of
from turboserve.simulation.settings import Scale
from turboserve.state_store.core import workers
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.service import app

ABSORBS = Scale(
    workers=1,
    most_workers=3,
    slots=1,
    fidelity="in-time",
    quality_debt_limit=0.3,
    absorb_at_maximum=True,
)
RESCUES = Scale(workers=3, most_workers=3, slots=3, fidelity="in-time", rescue_horizon_s=8.0)


def test_absorption_and_rescues_take_place_and_violate_nothing() -> None:
    absorbed = run_scenario(0, seconds=10.0, faults=CALM, scale=ABSORBS)
    assert absorbed.violations == {}, absorbed.messages
    assert absorbed.counts["absorbed"] > 0
    assert absorbed.counts["lowered"] > 0
    rescued = run_scenario(0, seconds=10.0, faults=CALM, scale=RESCUES)
    assert rescued.violations == {}, rescued.messages
    assert rescued.counts["rescues"] > 0


@pytest.mark.parametrize("seeds", [3, pytest.param(12, marks=pytest.mark.soak)])
def test_seeds_with_all_mechanisms_violate_nothing(seeds: int) -> None:
    result = command.run(seeds=seeds, first=20_001, seconds=10.0, mechanisms=Mechanisms.ALL)
    assert result["failing"] == []
    assert result["counts"]["chunks"] > 0


def test_a_share_of_the_seeds_draws_each_mechanism_and_the_others_run_as_without() -> None:
    drawn = [scale_of(seed) for seed in range(400)]
    without = [scale_of(seed, Mechanisms.NONE) for seed in range(400)]
    for name in ("fidelity", "gather", "rescue_horizon_s", "quality_debt_limit", "admission_slot_s"):
        changed = sum(getattr(a, name) != getattr(b, name) for a, b in zip(drawn, without, strict=True))
        assert 40 < changed < 160, name
    assert sum(a == b for a, b in zip(drawn, without, strict=True)) > 150
    every = with_mechanisms(Scale(), 1, Mechanisms.ALL)
    assert (every.fidelity, every.gather) == ("in-time", "tiers")
    assert min(every.rescue_horizon_s, every.quality_debt_limit, every.admission_slot_s or 0) > 0


def test_a_device_that_absorbs_serves_k_sessions_and_not_one_more() -> None:
    for slots in (1, 2, 3):
        device = Scale(slots=slots, fidelity="in-time", quality_debt_limit=0.1).profile(1.0)
        assert device.slabs == 2 * slots
        media_s = device.config.chunk_media_s
        chunk_s = device.chunk_s()
        curve = {size: LatencyProfile(chunk_s)(size) for size in range(1, 2 * slots + 1)}
        assert curve[slots] <= 0.95 * media_s < curve[slots + 1]
        # The floor carries all of them.
        assert 0.4 * curve[2 * slots] <= 0.95 * media_s


def test_a_worker_that_reports_more_than_its_memory_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    floor_capacity_of = app.floor_capacity_of
    monkeypatch.setattr(app, "floor_capacity_of", lambda *given: floor_capacity_of(*given) + 1)
    assert is_found("capacity", range(4), CALM, scale=ABSORBS)


def test_a_scheduler_and_a_store_that_absorb_beyond_the_floor_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PoolEntry, "limit", property(lambda self: self.floor_slots + 1))
    monkeypatch.setattr(workers.Slots, "check_room", lambda self, worker, retry_s: None)
    assert is_found("capacity", range(4), CALM, scale=ABSORBS)


def test_a_pool_that_shrinks_while_quality_is_owed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisor, "owed", lambda feedback: "")
    assert violations((3, 9, 13, 18, 75), CALM, seconds=25.0, scale=ABSORBS) == {"debt_never_shrinks"}


def test_sessions_that_do_not_rest_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers give each other the same session, since each of them alone would be late without it."""

    def forgets(self: Migrations, view: View, now: float) -> None:
        view.ended_migrations.clear()

    monkeypatch.setattr(Migrations, "_note_ends", forgets)
    assert is_found("sessions_rest", (12, 22), CALM, scale=RESCUES)
