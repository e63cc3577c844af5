"""The warm-up: its measurements, its side effects, and the resulting number of sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from turboserve.worker.engine.context_forwards import RecacheWork
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.app import capacity_of, floor_capacity_of
from turboserve.worker.service.quality import beyond_slabs
from turboserve.worker.service.warm_up import (
    WarmUpError,
    _measure,
    measure,
    sessions_in_real_time,
    switch_prompts,
)
from turboserve.worker.settings import Settings


@pytest.mark.parametrize(
    ("seconds", "margin", "limit", "sessions"),
    [
        ({1: 0.1, 2: 0.2, 4: 0.4}, 0.6, 16, 4),
        ({1: 0.1, 2: 0.2, 4: 0.4}, 0.6, 3, 3),
        ({1: 0.1, 2: 0.11, 4: 0.13}, 0.6, 16, 16),
        ({1: 0.2}, 0.6, 16, 2),
        # A machine that is too slow for one session still serves one.
        ({1: 2.0, 2: 4.0}, 0.6, 16, 1),
    ],
)
def test_as_many_sessions_as_play_in_real_time(
    seconds: dict[int, float], margin: float, limit: int, sessions: int
) -> None:
    assert sessions_in_real_time(seconds, 0.75, margin, limit) == sessions


def test_sessions_beyond_the_slabs_wait_for_batches_of_as_many_rows_as_slabs(
    make_driver: Callable[..., Any], tiny_config: ModelConfig
) -> None:
    """8 sessions in batches of 2 need 4 · 0.44 chunks' time: they do not play in real time."""
    chunk_s = tiny_config.chunk_media_s
    seconds = {1: 0.40 * chunk_s, 2: 0.44 * chunk_s}
    best = Fidelity.best(tiny_config)
    lowest = Rung(Fidelity(2, best.window_chunks), 3.0, 0.9)
    ladder = FidelityLadder((Rung(best, 5.0, 1.0), lowest), floor=0.9)

    def capacities(host_sessions: int) -> tuple[int, int]:
        engine = make_driver(
            slabs=2, host_sessions=host_sessions, ladder=ladder, fidelity="in-time", max_batch=2
        ).engine
        settings = Settings(real_time_margin=0.9)
        return capacity_of(engine, seconds, settings), floor_capacity_of(engine, seconds, settings)

    assert capacities(0) == (2, 2)
    # 4 · 0.22 is 0.88 of a chunk; at the floor, 6 · 0.22 · 3 / 5 is 0.79 and 7 · 0.22 · 3 / 5 is 0.92.
    assert capacities(6) == (4, 6)
    assert capacities(1) == (3, 3)


def test_a_profile_beyond_the_slabs_is_linear_in_the_number_of_sessions() -> None:
    assert beyond_slabs({1: 0.3, 2: 0.33}, 2, 8) == pytest.approx({1: 0.3, 2: 0.33, 8: 1.32})
    # Sessions that were counted at once while states were copied are no batches.
    assert beyond_slabs({1: 0.3, 2: 0.33, 3: 0.34}, 2, 4) == pytest.approx({1: 0.3, 2: 0.33, 4: 0.66})
    assert beyond_slabs({1: 0.1, 2: 0.2, 4: 0.3}, 3, 6) == pytest.approx({1: 0.1, 2: 0.2, 3: 0.25, 6: 0.5})
    assert beyond_slabs({1: 0.1, 4: 0.3}, 3, 3) == {1: 0.1, 4: 0.3}
    assert beyond_slabs({}, 2, 8) == {}


def test_the_warm_up_measures_what_there_are_slabs_for_and_leaves_nothing(
    make_driver: Callable[..., Any],
) -> None:
    engine = make_driver(slabs=3).engine
    seconds = measure(engine)
    assert seconds.keys() == {1, 2}
    assert all(value > 0 for value in seconds.values())
    assert engine.free_slabs == 3
    assert engine.sessions == {}


def test_all_forwards_of_a_chunk_count(make_driver: Callable[..., Any]) -> None:
    """Incident: the fastest round was the first one, without the last forward of its chunks."""
    engine = make_driver(slabs=2).engine
    compute, forwards = engine.forward.compute, list[int]()

    def counted(batch: list[Any]) -> Any:
        forwards.append(len(batch))
        return compute(batch)

    engine.forward.compute = counted
    for sessions in (1, 2):
        rows = _measure(engine, sessions, lambda: float(sum(forwards)))
        assert rows == sessions * engine.config.chunk_forwards


@pytest.mark.parametrize(
    ("changes", "overlap", "recaches", "chunks"),
    [
        ({}, False, [3, 6, 9], 4),
        ({}, True, [3, 6, 9], 4),
        ({"local_attn_size": 8, "sink_size": 2}, False, [3, 6, 8], 4),
        # A session of this model ends with its third chunk: there is no recache after that.
        ({"local_attn_size": -1, "sink_size": 0, "max_frames": 10}, False, [3, 6], 3),
    ],
)
def test_every_recache_that_a_prompt_switch_may_need_is_computed_before_anybody_waits_for_it(
    make_driver: Callable[..., Any],
    tiny_config: ModelConfig,
    changes: dict[str, Any],
    overlap: bool,
    recaches: list[int],
    chunks: int,
) -> None:
    config = dataclasses.replace(tiny_config, **changes)
    engine = make_driver(slabs=2, config=config, overlap=overlap).engine
    frames, begun = [], set()
    compute = engine.forward.compute

    def counted(batch: list[Any]) -> Any:
        for session in batch:
            if isinstance(session.work, RecacheWork):
                frames.append(session.work.frames)
            else:
                begun.add(session.work.index)
        return compute(batch)

    engine.forward.compute = counted
    switch_prompts(engine)
    assert frames == recaches
    assert set(range(chunks)) <= begun
    # Each of them with a prompt that had to be encoded.
    assert sum(map(len, engine.models.text.calls)) == 1 + len(recaches)
    assert engine.free_slabs == 2
    assert engine.sessions == {}


def test_an_engine_that_cannot_make_a_chunk_is_no_engine(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(slabs=1)

    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(driver.engine.decode, "compute", fails)
    with pytest.raises(WarmUpError, match="no such kernel"):
        measure(driver.engine)
    with pytest.raises(WarmUpError, match="no such kernel"):
        switch_prompts(driver.engine)
    assert driver.engine.free_slabs == 1


def test_settings_come_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSERVE_WORKER_ID", "wrk_7")
    monkeypatch.setenv("TURBOSERVE_WORKER_MAX_SESSIONS", "3")
    monkeypatch.setenv("TURBOSERVE_POOL_MEMBER", "local-1")
    monkeypatch.setenv("TURBOSERVE_MAX_LEAD_S", "4.5")
    settings = Settings()
    assert (settings.worker_id, settings.worker_max_sessions) == ("wrk_7", 3)
    assert (settings.pool_member, settings.max_lead_s) == ("local-1", 4.5)
