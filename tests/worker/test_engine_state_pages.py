"""Migration of a session between two engines: page by page, while it generates and while it is quiesced."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.state_page_helpers import FAR, SPEC, copy, equal, frozen, prints, stayed
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    Event,
    SessionQuiesced,
    SessionSpec,
    Suspended,
)
from turboserve.worker.engine.snapshot import DECODER
from turboserve.worker.engine.state_pages import BY_POSITION, changed, digest_of


@pytest.mark.parametrize("rotation", ["window", "absolute"])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 7])
def test_a_migrated_session_goes_on_bit_for_bit(
    make_driver: Callable[..., Any], tiny_config: Any, before: int, rotation: str
) -> None:
    config = tiny_config.__class__(**{**vars(tiny_config), "rotation": rotation, "max_frames": 60})
    wanted = stayed(make_driver, before + 6, config=config)
    source, target = (make_driver(config=config, max_lead_s=FAR) for _ in range(2))
    source.engine.admit(SPEC, source.now)
    source.chunks("a", before)
    buffer = target.engine.reserve(on_host=False)
    # The bulk is sent in the middle of a chunk, whose own ring positions are left out.
    source.run(lambda _: source.engine.sessions["a"].work is not None)
    bulk = source.engine.pages("a")
    copy(bulk, buffer)
    next_chunk = frozen(source)
    header, pages = source.engine.export_session("a")
    rest = changed(pages, {page.name: page.stamp for page in bulk})
    assert len(rest) < len(pages)
    copy(rest, buffer)
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    assert header["next_chunk"] == next_chunk
    here, there = (driver.engine.export_session("a") for driver in (source, target))
    assert digest_of(here[0], prints(here[1])) == digest_of(there[0], prints(there[1]))
    target.engine.unquiesce("a")
    made = target.chunks("a", before + 6 - next_chunk)
    assert equal(made, wanted[next_chunk:])


def test_unchanged_pages_are_distinguished_from_changed_ones_after_any_number_of_chunks(
    make_driver: Callable[..., Any],
) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 4)
    frozen(driver)
    for chunks in (1, 2, 3, 5):
        _, before = driver.engine.export_session("a")
        old = prints(before)
        driver.engine.unquiesce("a")
        driver.chunks("a", chunks)
        frozen(driver)
        _, after = driver.engine.export_session("a")
        new = prints(after)
        resent = {page.name for page in changed(after, {page.name: page.stamp for page in before})}
        different = {name for name in new if old.get(name) != new[name]}
        assert different <= resent
        assert len(resent) < len(new)


@pytest.mark.parametrize("rotation", ["window", "absolute"])
def test_ring_positions_change_with_the_chunk_with_which_they_are_expected_to(
    make_driver: Callable[..., Any], tiny_config: Any, rotation: str
) -> None:
    config = tiny_config.__class__(**{**vars(tiny_config), "rotation": rotation, "max_frames": 60})
    driver = make_driver(max_lead_s=FAR, config=config)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 1)
    frozen(driver)
    for _ in range(9):
        _, before = driver.engine.export_session("a")
        ring = {page.name: page for page in before if page.name.split("/")[0] in BY_POSITION}
        next_chunk = driver.engine.sessions["a"].state.next_chunk
        driver.engine.unquiesce("a")
        driver.chunks("a", 1)
        made = frozen(driver) - next_chunk
        _, after = driver.engine.export_session("a")
        now = {page.name: page.stamp for page in after}
        written = {name for name, page in ring.items() if now[name] != page.stamp}
        expected = {name for name, page in ring.items() if page.lasts_s < made * config.chunk_media_s}
        assert written <= expected
        # Keys of the sink are turned only once the window is full.
        assert {name for name in expected - written if not name.startswith("keys/")} == set()


def test_what_was_sent_is_remembered_without_being_kept(make_driver: Callable[..., Any]) -> None:
    """A decoder's cache is new with every chunk. The stamps of an old one must not keep its gigabytes."""
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 2)
    pages = [page for page in driver.engine.pages("a") if page.name.startswith(DECODER)]
    cache = driver.engine.sessions["a"].state.decoder_cache
    kept = [weakref.ref(tensor) for tensor in cache.values()]
    sent = {page.name: page.stamp for page in pages}
    assert len(sent) == len(kept) > 0
    assert changed([p for p in driver.engine.pages("a") if p.name in sent], sent) == []
    del cache, pages
    driver.chunks("a", 1)
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    now = [page for page in driver.engine.pages("a") if page.name in sent]
    assert changed(now, sent) == now


def test_a_prompt_switch_changes_the_pages_that_it_rewrites(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 4)
    frozen(driver)
    _, before = driver.engine.export_session("a")
    old = prints(before)
    driver.engine.control("a", Control(1, prompt="a blue square"))
    assert not driver.engine.has_work(driver.now) or driver.run() == []
    driver.engine.unquiesce("a")
    driver.run(lambda _: driver.engine.sessions["a"].state.control_seq == 1)
    frozen(driver)
    _, after = driver.engine.export_session("a")
    new = prints(after)
    resent = {page.name for page in changed(after, {page.name: page.stamp for page in before})}
    assert {"text", "text_keys", "text_values"} <= resent
    assert {name for name in new if old.get(name) != new[name]} <= resent


def test_a_frozen_session_makes_nothing_and_a_thawed_one_goes_on_as_if_nothing_had_been(
    make_driver: Callable[..., Any],
) -> None:
    wanted = stayed(make_driver, 5)
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    made = driver.chunks("a", 2)
    driver.engine.quiesce("a", driver.now, 0.0, 0.0)
    made += [event for event in driver.run() if isinstance(event, ChunkReady)]
    assert not driver.engine.has_work(driver.now + 100)
    assert driver.engine.next_due(driver.now) is None
    driver.engine.unquiesce("a")
    made += driver.chunks("a", 5 - len(made))
    assert equal(made, wanted)


def test_it_stands_still_when_the_viewer_has_enough_and_not_before(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=2.0)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 1)
    driver.engine.quiesce("a", driver.now, 0.3, 100.0)
    events = driver.run()
    made = [event.index for event in events if isinstance(event, ChunkReady)]
    assert [event.next_chunk for event in events if isinstance(event, SessionQuiesced)] == [made[-1] + 1]
    assert driver.engine.config.media_start(made[-1] + 1) >= 2.0


def test_it_takes_the_best_moment_that_there_is_between_two_chunks(make_driver: Callable[..., Any]) -> None:
    """Incident: asked for too long a window, it ran until the timeout and quiesced just before a chunk."""
    driver = make_driver(max_lead_s=2.0)
    driver.engine.admit(SPEC, driver.now)
    driver.run()
    driver.engine.quiesce("a", driver.now, 1.2, 3.0)
    began: float = driver.now
    events: list[SessionQuiesced] = []
    while not events and driver.now < began + 5:
        driver.engine.playhead("a", driver.now - began, now=driver.now)
        events = [event for event in driver.run() if isinstance(event, SessionQuiesced)]
        driver.now += 0.05
    start_s = driver.engine.config.media_start(events[0].next_chunk)
    assert start_s - 2.0 - (driver.now - began) >= 0.5


def test_a_session_that_is_never_ahead_stands_still_once_patience_ends(
    make_driver: Callable[..., Any],
) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.engine.quiesce("a", driver.now, 0.3, 0.05)
    events = driver.run()
    assert isinstance(events[-1], SessionQuiesced)
    assert driver.now >= 100.05


def play(
    driver: Any, step_s: float, until: Callable[[list[Event]], bool], position_s: float = 0.0
) -> tuple[list[Event], float]:
    """Step an engine whose steps take `step_s`, while the viewer of `a` plays what was delivered to it.

    Returns the events and the viewer's position in seconds.
    """
    events: list[Event] = []
    for _ in range(2_000):
        if until(events):
            return events, position_s
        if driver.engine.executors_busy:
            driver.engine.wait(120.0)
        driver.engine.playhead("a", position_s, now=driver.now)
        events += driver.engine.step(driver.now)
        driver.now += step_s
        end_s = driver.engine.config.media_start(driver.engine.sessions["a"].delivered)
        position_s = min(position_s + step_s, end_s)
    raise AssertionError(f"still playing after {len(events)} events")


def quiesced_at(events: list[Event]) -> int | None:
    return next((event.next_chunk for event in events if isinstance(event, SessionQuiesced)), None)


def test_a_session_that_falls_behind_its_viewer_stops_at_the_next_boundary(
    make_driver: Callable[..., Any],
) -> None:
    """Incident: it waited for an idle window on a worker too slow for it, so that no rescue succeeded."""
    for step_s, waits in ((0.3, False), (0.05, True)):
        driver = make_driver(max_lead_s=4.0)
        driver.engine.admit(SPEC, driver.now)
        _, position_s = play(
            driver, step_s, lambda events: sum(isinstance(event, ChunkReady) for event in events) == 3
        )
        session = driver.engine.sessions["a"]
        running, lead_s = session.state.next_chunk, driver.engine.pacing.lead_at(session, driver.now)
        driver.engine.quiesce("a", driver.now, 0.3, 1e3)
        play(driver, step_s, lambda events: quiesced_at(events) is not None, position_s)
        if waits:
            assert driver.engine.pacing.lead_at(session, driver.now) > 3.5 > lead_s
        else:
            assert session.state.next_chunk <= running + 1


def test_a_quiesced_session_does_not_wait_for_a_forward_of_others(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=FAR)
    for name in ("a", "b"):
        driver.engine.admit(SessionSpec(name, "a red circle", seed=11), driver.now)
    driver.chunks("a", 2)
    driver.engine.quiesce("a", driver.now, 0.0, 0.0)
    other = driver.engine.sessions["b"]

    def forwards() -> int:
        done = 0 if other.work is None else other.work.done
        return int(other.state.next_chunk * driver.engine.config.chunk_forwards + done)

    before, events = 0, list[Event]()
    while quiesced_at(events) is None:
        before, events = forwards(), driver.run(lambda _: True)
    assert forwards() == before
    assert driver.chunks("b", 1)


def test_a_suspended_session_migrates_from_host_to_host_and_wakes_there(
    make_driver: Callable[..., Any],
) -> None:
    wanted = stayed(make_driver, 8)
    source, target = (make_driver(max_lead_s=FAR) for _ in range(2))
    source.engine.admit(SPEC, source.now)
    source.chunks("a", 3)
    source.engine.suspend("a")
    events = source.run(lambda events: any(isinstance(event, Suspended) for event in events))
    next_chunk = next(event.next_chunk for event in events if isinstance(event, Suspended))
    header, pages = source.engine.export_session("a")
    again = source.engine.export_session("a")[1]
    assert changed(again, {page.name: page.stamp for page in pages}) == []
    buffer = target.engine.reserve(on_host=True)
    copy(pages, buffer)
    free = target.engine.free_slabs
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    assert target.engine.free_slabs == free
    assert target.engine.snapshot("a").digest() == source.engine.snapshot("a").digest()
    target.engine.resume("a", target.now)
    assert equal(target.chunks("a", 8 - next_chunk), wanted[next_chunk:])
    target.engine.evict("a")
    assert target.engine.host_bytes_used == 0


def test_a_session_that_stood_still_can_be_suspended(make_driver: Callable[..., Any]) -> None:
    wanted = stayed(make_driver, 6)
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    made = driver.chunks("a", 2)
    driver.engine.quiesce("a", driver.now, 0.0, 0.0)
    made += [event for event in driver.run() if isinstance(event, ChunkReady)]
    driver.engine.unquiesce("a")
    driver.engine.suspend("a")
    events = driver.run(lambda events: any(isinstance(event, Suspended) for event in events))
    assert not [event for event in events if isinstance(event, ChunkReady)]
    driver.engine.resume("a", driver.now)
    made += driver.chunks("a", 6 - len(made))
    assert equal(made, wanted)
