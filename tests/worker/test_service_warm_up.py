"""The warm-up: its measurements, its side effects, and the resulting number of sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from turboserve.worker.engine.work import RecacheWork
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.warm_up import WarmUpError, measure, sessions_in_real_time, switch_prompts
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


def test_the_warm_up_measures_what_there_are_slots_for_and_leaves_nothing(
    make_driver: Callable[..., Any],
) -> None:
    engine = make_driver(slots=3).engine
    seconds = measure(engine)
    assert seconds.keys() == {1, 2}
    assert all(value > 0 for value in seconds.values())
    assert engine.free_slots == 3
    assert engine.sessions == {}


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
    engine = make_driver(slots=2, config=config, overlap=overlap).engine
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
    assert engine.free_slots == 2
    assert engine.sessions == {}


def test_an_engine_that_cannot_make_a_chunk_is_no_engine(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(slots=1)

    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(driver.engine.decode, "compute", fails)
    with pytest.raises(WarmUpError, match="no such kernel"):
        measure(driver.engine)
    with pytest.raises(WarmUpError, match="no such kernel"):
        switch_prompts(driver.engine)
    assert driver.engine.free_slots == 1


def test_settings_come_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSERVE_WORKER_ID", "wrk_7")
    monkeypatch.setenv("TURBOSERVE_WORKER_MAX_SESSIONS", "3")
    monkeypatch.setenv("TURBOSERVE_POOL_MEMBER", "local-1")
    monkeypatch.setenv("TURBOSERVE_MAX_LEAD_S", "4.5")
    settings = Settings()
    assert (settings.worker_id, settings.worker_max_sessions) == ("wrk_7", 3)
    assert (settings.pool_member, settings.max_lead_s) == ("local-1", 4.5)
