"""A pool with several offers: short seeds without a violation, and a planted fault that is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from tests.simulation.simulate_plants import SHORT_S, is_found
from turboserve.autoscaler.control.pool_offers import OfferWorkers
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import SizesWanted
from turboserve.autoscaler.pool_file import OfferEntry, PoolFile
from turboserve.autoscaler.pool_members import PoolMember
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.simulation import command
from turboserve.simulation.command import SimulationMode
from turboserve.simulation.faults import CALM
from turboserve.simulation.pool_offers import draw_offers, takes_places
from turboserve.simulation.scenario import run_scenario, scale_of, with_offers
from turboserve.simulation.session_classes import NAMES

LATER = [pytest.param(first, 6, marks=pytest.mark.soak) for first in range(30_000, 30_030, 6)]


@pytest.mark.parametrize(("first", "seeds"), [(30_001, 4), *LATER])
def test_no_seed_violates_anything(first: int, seeds: int) -> None:
    result = command.run(seeds=seeds, first=first, seconds=SHORT_S, offers=True)
    assert result["failing"] == []
    assert result["counts"]["chunks"] > 0


@pytest.mark.parametrize("seed", [30_000, 30_003])
def test_workers_of_an_offer_with_both_classes_violate_nothing(seed: int) -> None:
    scale = with_offers(scale_of(seed), seed)
    assert scale.pool_file is not None
    shared = OfferEntry(name="shared", kind="either", models=scale.pool_file.models)
    file = PoolFile(kinds=scale.pool_file.kinds, offers=(*scale.pool_file.offers, shared))
    scale = replace(scale, pool_file=file)
    assert scale.worker("w", "local-shared-0").models == file.models
    outcome = run_scenario(seed, seconds=SHORT_S, scale=scale)
    assert outcome.violations == {}


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


def test_a_release_is_compared_with_what_the_workers_hold() -> None:
    _, file = draw_offers(0)
    pool, places = Pool("local", lambda: "wrk_1"), dict.fromkeys(file.models, 2)

    def fault(sizes: int, *members: PoolMember) -> str:
        pool.sizes = {"stays": 1, "left": 0, "right": sizes}
        pool.members = {member.name: member for member in members}
        fewer = SizesWanted({"stays": 1, "left": 0, "right": sizes - 1}, "test")
        return takes_places(pool, fewer, file, places, {}, 100.0) or ""

    ready = PoolMember("local-right-0", 0, "right", PoolMemberPhase.READY)
    assert fault(1, ready) == ""
    assert "1 sessions of" in fault(1, replace(ready, sessions=1))
    assert "1 sessions of" in fault(1, replace(ready, suspended=2))
    loading = PoolMember("local-right-1", 1, "right", PoolMemberPhase.LOADING)
    assert fault(2, replace(ready, sessions=1), loading) == ""
    ends = PoolMember("local-left-0", 0, "left", PoolMemberPhase.RELEASING, 80.0, wanted=False)
    assert "before another one" in fault(1, ready, ends)
    assert fault(1, ready, replace(ends, since=60.0)) == ""


def test_calm_mode_refuses_offers() -> None:
    with pytest.raises(typer.BadParameter, match="--offers: calm mode"):
        command.run(mode=SimulationMode.CALM, offers=True)
