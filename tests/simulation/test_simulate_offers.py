"""A pool with several offers: short seeds without a violation, and a planted fault that is found."""

from __future__ import annotations

import pytest
import typer

from tests.simulation.simulate_plants import SHORT_S, is_found
from turboserve.autoscaler.control.pool_offers import OfferWorkers
from turboserve.simulation import command
from turboserve.simulation.command import SimulationMode
from turboserve.simulation.faults import CALM
from turboserve.simulation.pool_offers import draw_offers
from turboserve.simulation.scenario import scale_of, with_offers
from turboserve.simulation.session_classes import NAMES

LATER = [pytest.param(first, marks=pytest.mark.soak) for first in range(30_006, 30_030, 6)]


@pytest.mark.parametrize("first", [30_000, *LATER])
def test_no_seed_violates_anything(first: int) -> None:
    result = command.run(seeds=6, first=first, seconds=SHORT_S, offers=True)
    assert result["failing"] == []
    assert result["counts"]["chunks"] > 0


def test_seeds_draw_classes_limits_and_prices() -> None:
    drawn = [draw_offers(seed) for seed in range(60)]
    assert {classes.first for classes, _ in drawn} == set(NAMES)
    files = [file for _, file in drawn]
    assert {file.limits for file in files} == {(least, most) for least in (0, 1) for most in (2, 3, 4)}
    assert len({file.kinds["either"].price for file in files}) == 3
    scale = with_offers(scale_of(3), 3)
    members = {f"local-{name}-0": scale.worker("w", f"local-{name}-0").models for name in ("stays", "right")}
    assert {len(models) for models in members.values()} == {1}
    assert len(set(members.values())) == 2


def test_a_release_that_takes_the_place_of_a_live_session_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfferWorkers, "keeps_places", lambda *_: True)
    scale = with_offers(scale_of(11), 11)
    assert is_found("keeps_places", range(40), CALM, seconds=12.0, scale=scale, finds=11)


def test_calm_mode_refuses_offers() -> None:
    with pytest.raises(typer.BadParameter, match="--offers: calm mode"):
        command.run(mode=SimulationMode.CALM, offers=True)
