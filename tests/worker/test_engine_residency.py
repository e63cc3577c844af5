"""More active sessions than slabs: exchanges, equality bit for bit, and what happens to a session outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.worker.device_harness import fill
from turboserve.worker.engine.errors import SessionsExhaustedError, SnapshotRejectedError
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    ControlApplied,
    Rebuild,
    SessionFailed,
    SessionQuiesced,
    SessionSpec,
    Suspended,
    SuspendRefused,
)
from turboserve.worker.engine.streams import DEVICE_LOST

MakeDriver = Callable[..., Any]
PROFILES = {"forward": {1: 0.01, 4: 0.01}, "decode": {1: 0.001}}


def spec(name: str, seed: int, **rest: Any) -> SessionSpec:
    return SessionSpec(name, f"a circle of color {seed}", seed, **rest)


def play(driver: Any, names: list[str], seconds: float, tick_s: float = 0.02) -> dict[str, list[ChunkReady]]:
    """Let viewers play, each up to what is delivered. Returns the chunks by session."""
    made: dict[str, list[ChunkReady]] = {name: [] for name in names}
    engine, config = driver.engine, driver.engine.config
    position = dict.fromkeys(names, 0.0)
    end = driver.now + seconds
    while driver.now < end:
        for name in names:
            if name in engine.sessions:
                limit_s = config.media_start(engine.sessions[name].delivered)
                position[name] = min(position[name] + tick_s, limit_s)
                engine.playhead(name, position[name], now=driver.now)
        before = driver.now
        for event in driver.run():
            if isinstance(event, ChunkReady):
                made[event.session].append(event)
        driver.now = max(driver.now, before + tick_s)
    return made


def test_the_video_is_equal_bit_for_bit_with_and_without_offloading(make_driver: MakeDriver) -> None:
    names = [f"s{n}" for n in range(5)]

    def generate(**options: Any) -> tuple[Any, dict[str, list[ChunkReady]]]:
        driver = make_driver(profiles=PROFILES, max_batch=1, max_lead_s=2.0, **options)
        for seed, name in enumerate(names):
            driver.engine.admit(spec(name, seed), driver.now)
        return driver, play(driver, names, 8.0)

    few, offloaded = generate(slabs=2, host_sessions=3)
    _, resident = generate(slabs=5)
    assert few.engine.residency.counts.returns > 6
    for name in names:
        count = min(len(offloaded[name]), len(resident[name]))
        assert count >= 8
        for one, other in zip(offloaded[name][:count], resident[name][:count], strict=True):
            assert one.index == other.index
            assert torch.equal(one.latents, other.latents)
            assert torch.equal(one.frames, other.frames)
    assert few.engine.slabs == 2
    assert few.engine.places == 5


def test_admission_counts_slabs_and_host_memory_together(make_driver: MakeDriver) -> None:
    driver = make_driver(slabs=1, host_sessions=2)
    for seed in range(3):
        driver.engine.admit(spec(f"s{seed}", seed), driver.now)
    with pytest.raises(SessionsExhaustedError, match=r"no room in 1 slab \(\d+ bytes each\) and 2 places in"):
        driver.engine.admit(spec("s3", 3), driver.now)
    driver.engine.evict("s2")
    driver.engine.admit(spec("s3", 3), driver.now)


@pytest.fixture
def crowded(make_driver: MakeDriver) -> Any:
    """One slab, two sessions: both have chunks up to their lead, and `a` is outside."""
    driver = make_driver(slabs=1, host_sessions=1, profiles=PROFILES, max_batch=1, max_lead_s=2.0)
    for seed, name in enumerate("ab"):
        driver.engine.admit(spec(name, seed), driver.now)
    play(driver, ["a", "b"], 3.0)
    while (held := driver.engine.sessions["a"]).has_slab:
        play_on(driver, "ab")
    assert held.activity.state is not None
    return driver


def play_on(driver: Any, names: str) -> list[Any]:
    """Let the viewers of these sessions play for 0.1 s."""
    for name in names:
        held = driver.engine.sessions[name]
        reached = min(held.playhead.position_s + 0.1, driver.engine.config.media_start(held.delivered))
        driver.engine.playhead(name, reached, now=driver.now)
    before = driver.now
    events: list[Any] = driver.run()
    driver.now = max(driver.now, before + 0.1)
    return events


def twin(make_driver: MakeDriver, seed: int, prompt_at: tuple[int, str] | None = None) -> list[ChunkReady]:
    """The first chunks of the same session with a slab of its own."""
    driver = make_driver(slabs=1, max_lead_s=100.0)
    driver.engine.admit(spec("twin", seed), driver.now)
    made: list[ChunkReady] = []
    if prompt_at is not None:
        # The prompt takes effect at exactly this boundary.
        while (held := driver.engine.sessions["twin"]).chunk is None or held.chunk.index + 1 != prompt_at[0]:
            made += chunks_of(driver.engine.step(driver.now), "twin")
        driver.engine.control("twin", Control(1, prompt=prompt_at[1]))
    made += driver.chunks("twin", 14 - len(made))
    return made


def chunks_of(events: list[Any], name: str) -> list[ChunkReady]:
    return [event for event in events if isinstance(event, ChunkReady) and event.session == name]


def run_until(driver: Any, names: str, found: Callable[[list[Any]], Any]) -> list[Any]:
    events: list[Any] = []
    for _ in range(200):
        events += play_on(driver, names)
        if found(events):
            return events
    raise AssertionError("not within 20 s")


def host_is_empty(driver: Any) -> bool:
    return bool(driver.engine.offloaded_bytes == driver.engine.host_bytes_used == 0)


def test_a_session_outside_ends(crowded: Any) -> None:
    crowded.engine.evict("a")
    assert not crowded.engine.knows("a")
    assert host_is_empty(crowded)
    assert chunks_of(run_until(crowded, "b", lambda events: len(chunks_of(events, "b")) > 3), "b")
    crowded.engine.evict("b")
    assert crowded.engine.free_slabs == 1


def test_a_session_outside_is_suspended_where_it_is_and_resumes(
    crowded: Any, make_driver: MakeDriver
) -> None:
    engine = crowded.engine
    made, returns = engine.sessions["a"].delivered, engine.residency.counts.returns
    engine.suspend("a")
    [suspended] = [event for event in crowded.run() if isinstance(event, Suspended)]
    assert (suspended.session, suspended.next_chunk) == ("a", made)
    assert engine.residency.counts.returns == returns
    assert (engine.offloaded, engine.offloaded_bytes) == (0, 0)
    assert engine.host_bytes_used > 0
    assert engine.snapshot("a").next_chunk == made
    engine.resume("a", crowded.now, waiting_s=0.0)
    events = run_until(crowded, "ab", lambda events: chunks_of(events, "a"))
    expected = twin(make_driver, 0)[made]
    assert torch.equal(chunks_of(events, "a")[0].latents, expected.latents)
    assert engine.host_bytes_used == 0


def test_a_suspension_that_does_not_fit_leaves_the_session_outside(make_driver: MakeDriver) -> None:
    driver = make_driver(slabs=1, host_sessions=1, host_bytes=0, profiles=PROFILES, max_batch=1)
    for seed, name in enumerate("ab"):
        driver.engine.admit(spec(name, seed), driver.now)
    run_until(driver, "ab", lambda _: driver.engine.residency.counts.offloads > 1)
    [outside] = [each for each in driver.engine.sessions.values() if not each.has_slab]
    driver.engine.suspend(outside.name)
    refused = run_until(driver, "ab", lambda events: [e for e in events if isinstance(e, SuspendRefused)])
    assert "host pool" in next(e.reason for e in refused if isinstance(e, SuspendRefused))
    assert driver.engine.knows(outside.name)


def test_a_prompt_switch_brings_a_session_back_and_takes_effect(
    crowded: Any, make_driver: MakeDriver
) -> None:
    made = crowded.engine.sessions["a"].delivered
    crowded.engine.control("a", Control(1, prompt="a blue square"))
    events = run_until(crowded, "ab", lambda events: chunks_of(events, "a"))
    [applied] = [event for event in events if isinstance(event, ControlApplied)]
    assert (applied.session, applied.chunk) == ("a", made)
    expected = twin(make_driver, 0, (made, "a blue square"))
    assert torch.equal(chunks_of(events, "a")[0].latents, expected[made].latents)
    assert not torch.equal(expected[made].latents, twin(make_driver, 0)[made].latents)


def test_a_session_outside_migrates_from_the_host(crowded: Any, make_driver: MakeDriver) -> None:
    engine, made = crowded.engine, crowded.engine.sessions["a"].delivered
    assert engine.pages("a")
    returns = engine.residency.counts.returns
    engine.quiesce("a", crowded.now, 0.0, 1.0, number=4)
    [quiesced] = [event for event in crowded.run() if isinstance(event, SessionQuiesced)]
    assert (quiesced.session, quiesced.next_chunk, quiesced.number) == ("a", made, 4)
    assert engine.residency.counts.returns == returns
    header, pages = engine.export_session("a")
    # At the target, too, sessions wait for slabs: the state arrives in a cell.
    target = make_driver(slabs=1, host_sessions=1, profiles=PROFILES, max_batch=1)
    target.engine.admit(spec("c", 7), target.now)
    buffer = target.engine.reserve(on_host=False)
    with pytest.raises(SessionsExhaustedError):
        target.engine.admit(spec("d", 8), target.now)
    fill(buffer, {page.name: [page, list(page.parts)] for page in pages})
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    assert target.engine.export_session("a")[0] == header
    target.engine.unquiesce("a")
    engine.evict("a")
    events = run_until(target, "ac", lambda events: chunks_of(events, "a"))
    assert torch.equal(chunks_of(events, "a")[0].latents, twin(make_driver, 0)[made].latents)
    assert (engine.offloaded_bytes, target.engine.host_bytes_used) == (0, 0)


def quiesced_outside(driver: Any) -> None:
    driver.engine.quiesce("a", driver.now, 0.0, 1.0)
    driver.run()
    assert not driver.engine.sessions["a"].has_slab


def test_a_rejected_import_ends_its_reservation_once(crowded: Any, make_driver: MakeDriver) -> None:
    quiesced_outside(crowded)
    header, pages = crowded.engine.export_session("a")
    names = [page.name for page in pages]
    for waits in (True, False):
        target = make_driver(slabs=1, host_sessions=1, profiles=PROFILES, max_batch=1)
        if waits:
            target.engine.admit(spec("c", 7), target.now)
        buffer = target.engine.reserve(on_host=False)
        assert (buffer.extent is not None) == waits
        fill(buffer, {page.name: [page, list(page.parts)] for page in pages})
        with pytest.raises(SnapshotRejectedError):
            target.engine.import_session(buffer, {**header, "next_chunk": -1}, names, target.now)
        target.engine.release(buffer)
        for name in "de"[waits:]:
            target.engine.admit(spec(name, 8), target.now)
        with pytest.raises(SessionsExhaustedError):
            target.engine.admit(spec("f", 9), target.now)


def test_a_session_that_resumed_outside_is_suspended_without_a_second_copy(
    crowded: Any, make_driver: MakeDriver
) -> None:
    engine, made = crowded.engine, crowded.engine.sessions["a"].delivered
    engine.suspend("a")
    crowded.run()
    used = engine.host_bytes_used
    # The rest of the pool is taken: a second copy beside the first does not fit.
    rest = engine._table.host.take(engine._table.host.free_bytes)
    engine.resume("a", crowded.now, waiting_s=0.0)
    assert not engine.sessions["a"].has_slab
    engine.suspend("a")
    events = crowded.run()
    assert not [event for event in events if isinstance(event, SuspendRefused)]
    assert [event.session for event in events if isinstance(event, Suspended)] == ["a"]
    engine._table.host.give_back(rest)
    assert (engine.host_bytes_used, engine.offloaded) == (used, 0)
    engine.resume("a", crowded.now, waiting_s=0.0)
    events = run_until(crowded, "ab", lambda events: chunks_of(events, "a"))
    assert torch.equal(chunks_of(events, "a")[0].latents, twin(make_driver, 0)[made].latents)
    assert engine.host_bytes_used == 0


def test_a_quiesced_session_outside_keeps_no_slab_from_arrivals(crowded: Any) -> None:
    quiesced_outside(crowded)
    crowded.engine.evict("b")
    buffer = crowded.engine.reserve(on_host=False)
    assert buffer.extent is None
    crowded.engine.release(buffer)
    crowded.engine.admit(spec("c", 7), crowded.now)
    assert crowded.engine.sessions["c"].has_slab


def test_an_arrival_gets_a_free_slab_where_no_cell_is_free(crowded: Any) -> None:
    crowded.engine.evict("b")
    host = crowded.engine._table.host
    taken = [host.take_cell() for _ in range(host.free_cells)]
    buffer = crowded.engine.reserve(on_host=False)
    assert buffer.extent is None
    crowded.engine.release(buffer)
    for extent in taken:
        host.give_back(extent)


def test_a_withdrawn_migration_leaves_the_session_where_it_was(crowded: Any) -> None:
    crowded.engine.quiesce("a", crowded.now, 0.0, 1.0)
    crowded.run()
    play_on(crowded, "b")
    assert not crowded.engine.sessions["a"].has_slab
    crowded.engine.unquiesce("a")
    assert run_until(crowded, "ab", lambda events: chunks_of(events, "a"))


def test_a_session_whose_pages_are_read_stays(crowded: Any) -> None:
    crowded.engine.pages("b")
    before = crowded.engine.residency.counts.offloads
    for _ in range(20):
        play_on(crowded, "ab")
        crowded.engine.pages("b")
    assert crowded.engine.residency.counts.offloads == before
    assert crowded.engine.sessions["b"].has_slab


def test_a_session_that_begins_outside_is_rebuilt_and_continues(make_driver: MakeDriver) -> None:
    source = twin(make_driver, 0)
    latents = torch.cat([chunk.latents for chunk in source[:3]])
    driver = make_driver(slabs=1, host_sessions=1, profiles=PROFILES, max_batch=1)
    driver.engine.admit(spec("b", 1), driver.now)
    driver.engine.admit(spec("a", 0, rebuild=Rebuild(3, latents), playhead_s=1.0), driver.now)
    assert driver.engine.sessions["a"].state.next_chunk == 3
    events = run_until(driver, "ab", lambda events: chunks_of(events, "a"))
    assert chunks_of(events, "a")[0].index == 3
    assert torch.equal(chunks_of(events, "a")[0].latents, source[3].latents)


def test_a_quiesced_session_outside_is_suspended_only_when_its_migration_has_ended(crowded: Any) -> None:
    crowded.engine.quiesce("a", crowded.now, 0.0, 1.0)
    assert [event.session for event in crowded.run()] == ["a"]
    crowded.engine.suspend("a")
    # The migration still reads the state in its cell.
    assert crowded.run() == []
    assert crowded.engine.offloaded_bytes > 0
    crowded.engine.unquiesce("a")
    assert [event.session for event in crowded.run() if isinstance(event, Suspended)] == ["a"]


def test_a_session_that_is_quiesced_instead_of_offloaded_does_not_stop_the_others(
    make_driver: MakeDriver,
) -> None:
    driver = make_driver(slabs=2, host_sessions=1, profiles=PROFILES, max_batch=1, max_lead_s=2.0)
    for seed, name in enumerate("abc"):
        driver.engine.admit(spec(name, seed), driver.now)
    engine = driver.engine
    run_until(driver, "abc", lambda _: engine.residency.counts.offloads > 1 and engine.offloaded)
    leaving = next(each for each in engine.sessions.values() if each.has_slab)
    engine.quiesce(leaving.name, driver.now, 0.0, 1.0)
    # The decision for its slab falls before the boundary.
    leaving.offloading = True
    run_until(driver, "abc", lambda events: [e for e in events if isinstance(e, SessionQuiesced)])
    others, before = "abc".replace(leaving.name, ""), engine.residency.counts.offloads
    run_until(driver, others, lambda _: engine.residency.counts.offloads > before + 1)
    assert leaving.has_slab


def test_a_return_that_fails_ends_only_its_session(crowded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rejects(*_: object) -> Any:
        raise SnapshotRejectedError("version", 2, 1)

    monkeypatch.setattr(crowded.engine.backend, "arrive", rejects)
    events = run_until(crowded, "b", lambda events: [e for e in events if isinstance(e, SessionFailed)])
    [failed] = [event for event in events if isinstance(event, SessionFailed)]
    assert failed.session == "a"
    assert "snapshot version" in failed.error
    monkeypatch.undo()
    assert run_until(crowded, "b", lambda events: chunks_of(events, "b"))
    assert host_is_empty(crowded)
    assert (crowded.engine.free_slabs, set(crowded.engine.sessions)) == (0, {"b"})


def test_a_device_lost_in_a_return_ends_the_engine(crowded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> Any:
        raise DEVICE_LOST[0]("unspecified launch failure")

    monkeypatch.setattr(crowded.engine.backend, "arrive", lost)
    with pytest.raises(DEVICE_LOST):
        run_until(crowded, "b", lambda _: False)
    assert set(crowded.engine.sessions) == {"a", "b"}
