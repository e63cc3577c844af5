"""Forecasts count what comes before a chunk: the encoding of a prompt, a recache, a rebuild."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import ChunkReady, Control, Rebuild, SessionSpec
from turboserve.worker.engine.playout import Playout
from turboserve.worker.engine.session import ContextTask

MakeDriver = Callable[..., Any]
PROFILE = LatencyProfile({1: 0.02, 2: 0.03, 4: 0.05, 8: 0.08})
ENCODING_S, RECACHE_S = 0.04, 0.07


def with_context(make_driver: MakeDriver, **options: Any) -> Any:
    """A driver whose forwards and encodings take the time of their profiles."""
    driver = make_driver(**options)
    engine = driver.engine
    for size, seconds in PROFILE.to_mapping().items():
        engine.forward.profile._set(size, seconds)
    engine.forward.recache_profile._set(1, RECACHE_S)
    engine.text.profile._set(1, ENCODING_S)
    forward, encode = engine.backend.forward, engine.text.compute

    def timed_forward(works: list[Any]) -> Any:
        whole = works[0].frames > engine.config.frames_per_chunk
        driver.now += RECACHE_S if whole else PROFILE(len(works))
        return forward(works)

    def timed_encoding(batch: list[Any]) -> Any:
        driver.now += ENCODING_S * len(batch)
        return encode(batch)

    engine.backend.forward, engine.text.compute = timed_forward, timed_encoding
    return driver


def outcome(driver: Any, session: str) -> tuple[Playout, float]:
    """The forecast of the session's next chunk, and how late the chunk is."""
    began, found = driver.now, driver.engine.playouts(driver.now)[session]
    [chunk] = [event for event in driver.run(lambda events: made(events, session)) if made([event], session)]
    assert chunk.session == session
    return found, driver.now - began - found.slack_s


def made(events: Sequence[Any], session: str) -> bool:
    return any(isinstance(event, ChunkReady) and event.session == session for event in events)


@pytest.mark.parametrize("others", [0, 2])
def test_a_prompt_switch_counts_in_the_forecast(make_driver: MakeDriver, others: int) -> None:
    """Incident: a prompt that waited for its embedding and its recache made its chunk late unforeseen."""
    driver = with_context(make_driver, slabs=4, max_lead_s=0.5)
    engine = driver.engine
    names = ["s", *(f"o{i}" for i in range(others))]
    for seed, name in enumerate(names):
        engine.admit(SessionSpec(name, "a red circle", seed), driver.now)
    driver.run()
    for chunk in (1, 2, 3):
        for name in names:
            engine.playhead(name, engine.config.media_start(chunk), now=driver.now, playing=False)
        driver.run()
    assert {len(session.state.recent) for session in engine.sessions.values()} == {3}
    # The session's viewer is at the end of the video. The others' viewers have video left, and get one chunk.
    end_s = engine.config.media_start(4)
    for name in names[1:]:
        engine.playhead(name, end_s - 0.45, now=driver.now, playing=False)
    engine.playhead("s", end_s, now=driver.now)
    engine.control("s", Control(1, prompt="a blue square"))
    found, late_s = outcome(driver, "s")
    assert late_s >= ENCODING_S + RECACHE_S + 4 * PROFILE(1)
    assert found.lateness_s == pytest.approx(late_s, abs=0.02)


def test_a_rebuild_counts_in_the_forecast(make_driver: MakeDriver) -> None:
    lost = make_driver(max_lead_s=30.0)
    lost.engine.admit(SessionSpec("s", "a red circle"), lost.now)
    latents = torch.cat([chunk.latents for chunk in lost.chunks("s", 3)])
    driver = with_context(make_driver, slabs=2, max_lead_s=0.5)
    engine = driver.engine
    at_s = engine.config.media_start(3)
    rebuild = Rebuild(3, latents)
    engine.admit(SessionSpec("s", "a red circle", rebuild=rebuild, playhead_s=at_s), driver.now)
    engine.playhead("s", at_s, now=driver.now)
    found, late_s = outcome(driver, "s")
    # The prompt, three clean passes, and four denoising forwards of the chunk.
    assert found.lateness_s == pytest.approx(max(0.0, late_s), abs=0.02)
    assert late_s + found.slack_s == pytest.approx(ENCODING_S + 7 * PROFILE(1), abs=0.03)


def test_the_load_of_a_worker_has_its_prompt_switches(make_driver: MakeDriver) -> None:
    driver = with_context(make_driver, slabs=2, max_lead_s=30.0)
    engine = driver.engine
    engine.admit(SessionSpec("s", "a red circle"), driver.now)
    driver.chunks("s", 4)
    session, sessions = engine.sessions["s"], list(engine.sessions.values())
    while not session.chunk:
        engine.step(driver.now)

    def costs() -> tuple[float, float]:
        load = engine.fidelity.load(sessions, driver.now)
        return load.encoding_s, load.streams[0].context_s

    assert costs() == (0.0, 0.0)
    engine.control("s", Control(1, prompt="a blue square"))
    assert costs() == pytest.approx((ENCODING_S, RECACHE_S))
    while session.encoding:
        engine.step(driver.now)
    assert costs() == pytest.approx((0.0, RECACHE_S))
    recached = False
    while session.controls or isinstance(session.task, ContextTask):
        # The recache counts until it is done, also while it is the session's task.
        assert costs() == pytest.approx((0.0, RECACHE_S if session.controls or session.forwarding else 0.0))
        recached = recached or isinstance(session.task, ContextTask)
        engine.step(driver.now)
    assert recached
    assert costs() == (0.0, 0.0)
