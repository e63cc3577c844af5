"""The engine gives each chunk its configuration at the chunk boundary, by the policy and the load."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.worker.state_page_helpers import copy, frozen
from tests.worker.test_engine_decode_apart import elsewhere
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.engine.fidelity_policy import FIDELITY_POLICIES
from turboserve.worker.engine.interface import ChunkReady, Control, SessionSpec
from turboserve.worker.model.config import ModelConfig

MakeDriver = Callable[..., Any]
SLOW = {"forward": {1: 0.2, 4: 0.8}, "decode": {1: 0.01}, "package": {1: 0.01}}
"""A chunk takes a second alone, and batches gain nothing: at the best, the device serves less than one
session in real time."""


@pytest.fixture
def ladder(tiny_config: ModelConfig) -> FidelityLadder:
    best = Fidelity.best(tiny_config)
    return FidelityLadder(
        (
            Rung(best, 5.0, 1.0),
            Rung(Fidelity(2, best.window_chunks), 3.0, 0.95),
            Rung(Fidelity(1, 1, 0.5), 2.0, 0.9),
        ),
        floor=0.9,
    )


def spec(name: str, **limits: Any) -> SessionSpec:
    return SessionSpec(name, f"prompt of {name}", 1, **limits)


def crowded(
    make_driver: MakeDriver,
    ladder: FidelityLadder,
    policy: str,
    count: int = 3,
    *,
    apart: bool = False,
    **limits: Any,
) -> Any:
    """A driver with sessions whose viewers play, on a device that is too slow for them.

    `apart`: a decode worker decodes their chunks.
    """
    options = {"profiles": SLOW, "ladder": ladder, "fidelity": policy, "playhead_trust_s": 1e9}
    driver = slow(make_driver(slabs=4, decode_apart=apart, **options))
    if apart:
        elsewhere(driver)
    for number in range(count):
        driver.engine.admit(spec(f"s{number}", **limits), driver.now)
        driver.engine.playhead(f"s{number}", 0.0, now=driver.now)
    return driver


def slow(driver: Any, profiles: dict[str, dict[int, float]] = SLOW) -> Any:
    """The driver with forwards that take the time of their profile."""
    forward = driver.engine.backend.forward

    def timed(works: Sequence[Any]) -> Any:
        driver.now += profiles["forward"][1] * len(works)
        return forward(works)

    driver.engine.backend.forward = timed
    return driver


def chunks_of(driver: Any, count: int) -> list[ChunkReady]:
    made: list[ChunkReady] = []

    def enough(events: list[Any]) -> bool:
        made.extend(event for event in events if isinstance(event, ChunkReady))
        return len(made) >= count

    driver.run(enough)
    return made


def test_a_crowded_engine_lowers_chunks_and_says_so(make_driver: MakeDriver, ladder: FidelityLadder) -> None:
    found = {chunk.fidelity for chunk in chunks_of(crowded(make_driver, ladder, "in-time"), 9)}
    assert found & {rung.fidelity for rung in ladder.rungs[1:]}
    assert found <= {None, *(rung.fidelity for rung in ladder.rungs[1:])}


def test_chunks_that_are_decoded_elsewhere_are_lowered_alike(
    make_driver: MakeDriver, ladder: FidelityLadder
) -> None:
    together, apart = (
        chunks_of(crowded(make_driver, ladder, "in-time", apart=apart), 12) for apart in (False, True)
    )
    assert {chunk.lowered for chunk in together} == {True, False}
    choices = [
        [(chunk.session, chunk.index, chunk.fidelity, chunk.lowered) for chunk in made]
        for made in (together, apart)
    ]
    assert choices[0] == choices[1]
    assert all(torch.equal(a.frames, b.frames) for a, b in zip(together, apart, strict=True))


@pytest.mark.parametrize("policy", FIDELITY_POLICIES.names)
@pytest.mark.parametrize("limits", [{"pinned": True}, {"floor": 0.96}])
def test_limits_hold_under_every_policy(
    make_driver: MakeDriver, ladder: FidelityLadder, policy: str, limits: dict[str, Any]
) -> None:
    assert {chunk.fidelity for chunk in chunks_of(crowded(make_driver, ladder, policy, **limits), 9)} == {
        None
    }


def test_a_floor_shuts_out_what_is_below_it(make_driver: MakeDriver, ladder: FidelityLadder) -> None:
    found = {chunk.fidelity for chunk in chunks_of(crowded(make_driver, ladder, "in-time", floor=0.93), 9)}
    assert ladder.rungs[1].fidelity in found
    assert ladder.rungs[2].fidelity not in found


def test_a_policy_that_ignores_the_limits_is_corrected(
    make_driver: MakeDriver, ladder: FidelityLadder
) -> None:
    class Lowest:
        def choose(self, session: str, load: Any) -> int:
            return 2

    driver = crowded(make_driver, ladder, "in-time", pinned=True)
    driver.engine.fidelity._policy = Lowest()
    assert {chunk.fidelity for chunk in chunks_of(driver, 6)} == {None}


def test_the_policy_best_and_a_lone_rung_change_nothing(
    make_driver: MakeDriver, ladder: FidelityLadder
) -> None:
    """Bit-equal chunks in the same order, whether the mechanism is off, without a ladder, or without need."""
    runs = [
        chunks_of(crowded(make_driver, ladder, "best"), 8),
        chunks_of(crowded(make_driver, FidelityLadder.of_best(make_driver().engine.config), "in-time"), 8),
    ]
    relaxed = make_driver(slabs=4, ladder=ladder, fidelity="in-time")
    plain = make_driver(slabs=4)
    for driver in (relaxed, plain):
        for name in ("a", "b"):
            driver.engine.admit(spec(name), driver.now)
    runs += [chunks_of(relaxed, 6), chunks_of(plain, 6)]
    for one, other in (runs[:2], runs[2:]):
        assert [(a.session, a.index, a.fidelity) for a in one] == [(b.session, b.index, None) for b in other]
        assert all(torch.equal(a.latents, b.latents) for a, b in zip(one, other, strict=True))


IDLE = {"forward": {1: 0.02, 4: 0.08}, "decode": {1: 0.01}, "package": {1: 0.01}}
"""A chunk takes 0.1 s alone: one session needs a small part of the device."""


def test_a_new_scene_costs_one_chunk_of_quality_on_an_idle_device(
    make_driver: MakeDriver, ladder: FidelityLadder
) -> None:
    """Incident: a rise after such a chunk waited for the hold of 10 s. A viewer who prompted every 5 s saw
    half of the video at the floor."""
    driver = slow(
        make_driver(slabs=4, profiles=IDLE, ladder=ladder, fidelity="in-time", max_lead_s=2.0), IDLE
    )
    driver.engine.admit(spec("a"), driver.now)
    session, config = driver.engine.sessions["a"], driver.engine.config
    made: list[ChunkReady] = []
    scenes = {0}
    position_s, next_prompt_s, prompts = 0.0, driver.now + 5.0, 0
    while prompts < 6 or driver.now < next_prompt_s:
        if driver.now >= next_prompt_s:
            prompts, next_prompt_s = prompts + 1, driver.now + 5.0
            prompt = f"prompt {prompts}"
            driver.engine.control("a", Control(prompts, prompt=prompt, drops_buffer_since_s=driver.now))
        before = driver.now
        made += [event for event in driver.run() if isinstance(event, ChunkReady)]
        driver.now = max(driver.now, before + 0.05)
        if session.first is not None and session.first.discards:
            scenes.add(session.first.index)
            if session.delivered > session.first.index:
                position_s = max(position_s, config.media_start(session.first.index))
        position_s = min(position_s + driver.now - before, config.media_start(session.delivered))
        driver.engine.playhead("a", position_s, now=driver.now)
    assert len(scenes) == 7
    assert len(made) > 25
    assert {chunk.index for chunk in made if chunk.fidelity is not None} == scenes


def test_a_new_scene_does_not_shorten_the_hold(make_driver: MakeDriver, ladder: FidelityLadder) -> None:
    """A session that was lowered by the load goes on there after the first chunk of a scene."""
    chosen: list[tuple[int | None, float]] = []

    class Recorded:
        def choose(self, session: str, load: Any) -> int:
            [stream] = load.streams
            chosen.append((stream.held_place, stream.raised_s))
            return 2 if stream.starts else 1

    driver = make_driver(slabs=1, ladder=ladder, fidelity="in-time")
    driver.engine.fidelity._policy = Recorded()
    driver.engine.admit(spec("a"), driver.now)
    driver.chunks("a", 2)
    driver.engine.control("a", Control(1, prompt="another", drops_buffer_since_s=driver.now))
    driver.engine.playhead("a", 2.0, now=driver.now)
    driver.chunks("a", 4)
    assert {held for held, _ in chosen[:2]} == {0}
    # The chunk after a scene's first one is no raise.
    assert {held for held, _ in chosen[2:]} == {1}
    assert all(raised_s == float("inf") for _, raised_s in chosen)


def test_a_configuration_that_was_set_stays(make_driver: MakeDriver, ladder: FidelityLadder) -> None:
    driver = crowded(make_driver, ladder, "in-time")
    for number in range(3):
        driver.engine.control(f"s{number}", Control(1, fidelity=Fidelity(3, 1)))
    made = chunks_of(driver, 12)
    assert {chunk.fidelity for chunk in made if chunk.control_seq} == {Fidelity(3, 1)}


def test_only_the_load_makes_quality_debt(make_driver: MakeDriver, ladder: FidelityLadder) -> None:
    """Neither a configuration that a client has set, nor the chunk of a viewer with nothing to play."""
    crowd = chunks_of(crowded(make_driver, ladder, "in-time"), 12)
    first = {chunk.session: chunk.index for chunk in reversed(crowd)}
    starts = [chunk for chunk in crowd if chunk.index == 0]
    assert starts
    assert [chunk.fidelity is not None for chunk in starts] == [True] * len(starts)
    assert not any(chunk.lowered for chunk in starts)
    later = [chunk for chunk in crowd if chunk.index > first[chunk.session]]
    assert any(chunk.lowered for chunk in later)
    assert all(chunk.lowered == (chunk.fidelity is not None) for chunk in later)
    driver = crowded(make_driver, ladder, "in-time", 3)
    for number in range(3):
        driver.engine.control(f"s{number}", Control(1, fidelity=Fidelity(2, 1)))
    made = [chunk for chunk in chunks_of(driver, 12) if chunk.control_seq]
    assert made
    assert {chunk.fidelity for chunk in made} == {Fidelity(2, 1)}
    assert not any(chunk.lowered for chunk in made)


def test_expected_late_chunks_are_those_that_the_floor_does_not_save(
    make_driver: MakeDriver, ladder: FidelityLadder
) -> None:
    def late(policy: str, count: int, **limits: Any) -> int:
        driver = crowded(make_driver, ladder, policy, count, **limits)
        return int(driver.engine.expected_late(driver.now + 3.0))

    assert late("in-time", 1) == 0
    assert late("in-time", 4) > 0
    assert late("best", 4) >= late("in-time", 4, pinned=True) > late("in-time", 4)


def test_the_load_knows_where_a_video_ends(make_driver: MakeDriver, ladder: FidelityLadder) -> None:
    driver = crowded(make_driver, ladder, "in-time", 1)
    driver.chunks("s0", 1)
    session, sessions = driver.engine.sessions["s0"], list(driver.engine.sessions.values())
    begun = session.state.next_chunk + (session.chunk is not None)
    assert begun > 0

    def left(end: int | None) -> int | None:
        driver.engine.fidelity._end_frame = lambda state: end
        found: int | None = driver.engine.fidelity.load(sessions, driver.now).streams[0].chunks_left
        return found

    assert [left(None), left(3 * begun + 6), left(3 * begun), left(0)] == [None, 2, 0, 0]


def test_a_migrated_session_goes_on_bit_for_bit_with_changing_configurations(
    make_driver: MakeDriver, ladder: FidelityLadder
) -> None:
    """The target's policy chooses again; its choice is repeated at the source, which must yield the same."""
    source = crowded(make_driver, ladder, "in-time", 3, pinned=True)
    before = source.chunks("s0", 2)
    source.engine.control("s0", Control(1, pinned=False))
    before += source.chunks("s0", 3)
    assert {chunk.fidelity for chunk in before} >= {None, ladder.rungs[2].fidelity}
    frozen(source, "s0")
    header, pages = source.engine.export_session("s0")
    target = slow(make_driver(slabs=4, profiles=SLOW, ladder=ladder, fidelity="in-time"))
    buffer = target.engine.reserve(on_host=False)
    buffer.begin()
    copy(pages, buffer)
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    assert target.engine.sessions["s0"].state.fidelity == source.engine.sessions["s0"].state.fidelity
    target.engine.unquiesce("s0")
    target.engine.control("s0", Control(9, max_lead_s=60.0))
    moved = target.chunks("s0", 3)
    source.engine.unquiesce("s0")
    for chunk in moved:
        source.engine.sessions["s0"].state.fixed_fidelity = True
        source.engine.sessions["s0"].state.fidelity = chunk.fidelity
        source.engine.control("s0", Control(9, max_lead_s=60.0))
        stayed = source.chunks("s0", 1)[0]
        assert (stayed.index, stayed.fidelity) == (chunk.index, chunk.fidelity)
        assert torch.equal(stayed.latents, chunk.latents)
