"""Workers that serve two classes: short seeds without a violation, and planted faults that are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import typer

from tests.simulation.simulate_plants import SHORT_S, is_found
from tests.simulation.simulate_scene import scene
from turboserve.allocation.slots import SlotUnits
from turboserve.simulation import command
from turboserve.simulation.command import SimulationMode
from turboserve.simulation.faults import CALM
from turboserve.simulation.scenario import run_scenario, scale_of, with_classes
from turboserve.simulation.session_classes import NAMES, SessionClasses, draw_classes
from turboserve.simulation.settings import Scale
from turboserve.worker.service.class_drivers import ClassDrivers
from turboserve.worker.service.engine_commands import AdmitRequest

LARGE, SMALL = NAMES
LATER = [pytest.param(first, 6, marks=pytest.mark.soak) for first in range(20_000, 20_030, 6)]


def scale(sessions: dict[str, int], *outside: tuple[str, ...], workers: int = 1) -> Scale:
    return Scale(workers=workers, most_workers=workers, gateways=1, classes=SessionClasses(sessions, outside))


@pytest.mark.parametrize(("first", "seeds"), [(20_001, 4), *LATER])
def test_no_seed_violates_anything(first: int, seeds: int) -> None:
    result = command.run(seeds=seeds, first=first, seconds=SHORT_S, models=2)
    assert result["failing"] == []
    assert result["counts"]["chunks"] > 0


def test_both_classes_run_and_migrate() -> None:
    outcome = run_scenario(3, faults=CALM, scale=scale({SMALL: 3, LARGE: 2}, (LARGE,), workers=2))
    assert outcome.violations == {}
    assert outcome.counts["moves"] > 0
    assert outcome.counts["by_quota"] > 0
    assert outcome.settled_s is not None


def test_seeds_draw_orders_numbers_of_sessions_and_workers_outside_the_pool() -> None:
    drawn = [draw_classes(seed) for seed in range(60)]
    assert {one.first for one in drawn} == set(NAMES)
    assert all(len(set(one.sessions.values())) == 2 for one in drawn)
    kinds = {models for one in drawn for models in one.outside}
    assert {len(models) for models in kinds} == {1, 2}
    mixed = with_classes(replace(scale_of(0), fidelity="in-time", quality_debt_limit=0.1), 0)
    assert (mixed.fidelity, mixed.quality_debt_limit) == ("best", 0.0)


def one_slot_each(units: SlotUnits, _: str, counts: Mapping[str, int]) -> int:
    """In the place of `SlotUnits.of`: a session of any class counts as one slot."""
    return units.whole * sum(counts.values())


def test_a_session_that_counts_as_one_slot_of_another_class_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlotUnits, "of", one_slot_each)
    assert is_found("capacity", range(20), CALM, scale=scale({LARGE: 4, SMALL: 2}))


def test_a_session_in_the_engine_of_another_class_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out = ClassDrivers.carry_out

    def first_engine(self: ClassDrivers, order: Any) -> None:
        if isinstance(order, AdmitRequest):
            order = replace(order, admit=replace(order.admit, model=next(iter(self._drivers))))
        carry_out(self, order)

    monkeypatch.setattr(ClassDrivers, "carry_out", first_engine)
    assert is_found("serves_class", range(20), CALM, scale=scale({LARGE: 2, SMALL: 3}))


def test_a_session_on_a_worker_of_another_class_is_found() -> None:
    with scene(scale=scale({LARGE: 2, SMALL: 3}, (SMALL,))) as one:
        one.until(lambda: one.world.checker.classes.room(LARGE) > 0)
        created = one.does(one.users.create(1, model=LARGE))
        one.until(created.done)
        checks, [outside] = one.world.checker, one.world.outside
        row, [pooled] = created.result(), one.world.workers.keys() - {outside}
        checks.classes.placed(row, pooled)
        assert checks.violations == {}
        checks.classes.placed(row, outside)
        assert set(checks.violations) == {"serves_class"}


def test_options_that_need_one_model_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="models"):
        command.run(seeds=1, models=2, fidelity="in-time")
    with pytest.raises(typer.BadParameter, match="models"):
        command.run(mode=SimulationMode.CALM, models=2)


def test_a_failing_seed_is_replayed_with_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotUnits, "of", one_slot_each)
    # First a seed that finds the fault today.
    for seed in (10, *range(40)):
        result = command.run(seed=seed, seconds=SHORT_S, models=2)
        if result["failing"]:
            assert f"--seed {seed} --seconds 10 --models 2 --trace" in result["failing"][0]["replay"]
            return
    raise AssertionError("no seed finds the fault")
