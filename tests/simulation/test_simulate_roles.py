"""Decode workers and text workers: short seeds without a violation, and planted faults that are found."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from tests.simulation.simulate_plants import SHORT_S, is_found
from tests.simulation.simulate_scene import scene
from turboserve.simulation import command
from turboserve.simulation.faults import CALM, Faults
from turboserve.simulation.roles import DECODE, TEXT, RolePlace, RoleScale, draw_roles
from turboserve.simulation.scenario import run_scenario, unsettled
from turboserve.simulation.session_classes import MODEL
from turboserve.simulation.settings import Scale
from turboserve.worker.engine.decode_jobs import CacheTable
from turboserve.worker.remote_decoding.allotments import AllottedSessions
from turboserve.worker.remote_decoding.text_server import TextServer

LATER = [pytest.param(first, 6, marks=pytest.mark.soak) for first in range(30_000, 30_030, 6)]
APART = Scale(workers=2, most_workers=2, slots=3, gateways=1, roles=RoleScale(texts=1))
BROKEN = Faults(
    freeze={DECODE: 0.1},
    isolated={DECODE: 0.2, "worker": 0.05},
    slow_device={DECODE: 0.1},
    transfer_fails=0.1,
)


@pytest.mark.parametrize(("first", "seeds"), [(30_001, 4), *LATER])
def test_no_seed_violates_anything(first: int, seeds: int) -> None:
    result = command.run(seeds=seeds, first=first, seconds=SHORT_S, roles=True)
    assert result["failing"] == []
    assert result["counts"]["decoded"] > 0


def test_workers_that_switch_between_models_have_decode_workers_for_each() -> None:
    result = command.run(seeds=2, first=30_011, seconds=SHORT_S, roles=True, offers=True)
    assert result["failing"] == []
    assert result["counts"]["decoded"] > 0


def test_other_workers_decode_and_encode() -> None:
    outcome = run_scenario(3, faults=CALM, scale=APART)
    assert outcome.violations == {}, outcome.messages
    assert outcome.counts["moves"] > 0
    # A chunk may still be on its way when its session ends.
    assert outcome.counts["decoded"] >= outcome.counts["chunks"] > 0
    assert outcome.counts["encoded"] > 0


def test_seeds_draw_workers_and_speeds() -> None:
    drawn = [draw_roles(seed) for seed in range(60)]
    assert {one.decoders for one in drawn} == {1, 2, 3}
    assert {one.texts for one in drawn} == {0, 1, 2}
    assert APART.roles is not None
    assert APART.roles.places == {
        "decode-1": RolePlace(DECODE, MODEL),
        "decode-2": RolePlace(DECODE, MODEL),
        "text-1": RolePlace(TEXT, MODEL),
    }
    assert APART.worker("wk1_1", "m").roles == "denoise"
    assert Scale(roles=RoleScale(decoders=0, texts=1)).worker("wk1_1", "m").roles == "denoise,decode"


def test_no_session_is_admitted_beyond_what_decode_workers_carry() -> None:
    """The pool may grow to three workers with three slots each. Its decode worker carries three sessions."""
    limited = Scale(workers=1, most_workers=3, slots=3, gateways=1, roles=RoleScale(decoders=1, chunk_s=0.2))
    with scene(scale=limited) as one:
        pools = one.world.postgres.tables.pools.rows
        one.until(lambda: one.world.free_slots() == 3)
        one.until(lambda: [pool.decode_sessions for pool in pools.values()] == [3])
        found = []
        for seed in range(1, 5):
            created = one.does(one.users.create(seed, attempts=1))
            one.until(created.done)
            found.append(created.result())
        assert [record is not None for record in found] == [True, True, True, False]


def test_a_cache_of_another_chunk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session returns to a decode worker that has an older cache of it."""

    def found(self: CacheTable[Any], session: str, base: str) -> Any:
        kept = self._kept.get(session)
        return None if kept is None else kept.cache

    monkeypatch.setattr(CacheTable, "find", found)
    assert is_found("chunks_contiguous", range(20), BROKEN, scale=APART, finds=1)


def test_an_embedding_of_another_prompt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    question = TextServer._question

    async def other(self: TextServer, channel: Any, worker: str, capacity: int, asked: Any) -> None:
        await question(self, channel, worker, capacity, asked.model_copy(update={"prompt": "another one"}))

    monkeypatch.setattr(TextServer, "_question", other)
    assert is_found("converges_after_faults", range(4), CALM, scale=APART)


@pytest.mark.parametrize("planted", [False, True])
def test_a_worker_that_reports_more_sessions_than_are_allotted_to_it_is_found(
    monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    if planted:
        monkeypatch.setattr(AllottedSessions, "limit", lambda self, now: None)
    slow = Scale(workers=2, most_workers=2, slots=3, gateways=1, roles=RoleScale(decoders=1, chunk_s=0.2))
    with scene(scale=slow) as one:
        one.world.loop.advance(20.0)
        trouble = unsettled(one.world, one.users)
        assert (trouble is not None and "are allotted to it" in trouble) is planted


def test_options_that_need_one_model_are_refused() -> None:
    for more in ({"models": 2}, {"mode": command.SimulationMode.CALM}):
        options: dict[str, Any] = {"seeds": 1, "roles": True, **more}
        with pytest.raises(typer.BadParameter, match="--roles"):
            command.run(**options)
