"""Moving a session between two engines: page by page, while it generates and at rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from turboserve.worker.engine import adoption, moving
from turboserve.worker.engine.errors import (
    DuplicateSession,
    HostPoolFull,
    SlabsExhausted,
    SnapshotRejected,
    UnknownSession,
)
from turboserve.worker.engine.events import ChunkReady, Frozen, Suspended
from turboserve.worker.engine.landing import Landing
from turboserve.worker.engine.moving import Page, changed, digest_of, fingerprint_of, fingerprints_of
from turboserve.worker.engine.spec import Control, SessionSpec
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import Aborted

FAR = 1e9
SPEC = SessionSpec("a", "a red circle", seed=11)


def copy(pages: Iterable[Page], landing: Landing) -> None:
    for page in pages:
        places = landing.place(page.name, page.size, page.dtype, page.shape)
        for place, part in zip(places, page.parts, strict=True):
            place.copy_(part)


def prints(pages: Iterable[Page]) -> dict[str, bytes]:
    return {page.name: fingerprint_of(page.parts) for page in pages}


def frozen(driver: Any, session: str = "a") -> int:
    adoption.freeze(driver.engine, session, driver.now, 0.0, 0.0)
    events = driver.run(lambda events: any(isinstance(event, Frozen) for event in events))
    return next(event.next_chunk for event in events if isinstance(event, Frozen))


def equal(ours: list[ChunkReady], theirs: list[ChunkReady]) -> bool:
    return len(ours) == len(theirs) > 0 and all(
        a.index == b.index and torch.equal(a.latents, b.latents) and torch.equal(a.frames, b.frames)
        for a, b in zip(ours, theirs, strict=True)
    )


def stayed(make_driver: Callable[..., Any], chunks: int, **options: Any) -> list[ChunkReady]:
    """What the session makes where nothing happens to it."""
    driver = make_driver(max_lead_s=FAR, **options)
    driver.engine.admit(SPEC, driver.now)
    found: list[ChunkReady] = driver.chunks("a", chunks)
    return found


@pytest.mark.parametrize("rotation", ["window", "absolute"])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 7])
def test_a_moved_session_goes_on_bit_for_bit(
    make_driver: Callable[..., Any], tiny_config: Any, before: int, rotation: str
) -> None:
    config = tiny_config.__class__(**{**vars(tiny_config), "rotation": rotation, "max_frames": 60})
    wanted = stayed(make_driver, before + 6, config=config)
    source, target = (make_driver(config=config, max_lead_s=FAR) for _ in range(2))
    source.engine.admit(SPEC, source.now)
    source.chunks("a", before)
    landing = adoption.reserve(target.engine, on_host=False)
    # The bulk goes in the middle of a chunk, whose own slots are left out.
    source.run(lambda _: source.engine.table.sessions["a"].work is not None)
    bulk = adoption.read(source.engine, "a")
    copy(bulk, landing)
    next_chunk = frozen(source)
    header, pages = adoption.read_at_rest(source.engine, "a")
    rest = changed(pages, {page.name: page.stamp for page in bulk})
    assert len(rest) < len(pages)
    copy(rest, landing)
    adoption.adopt(target.engine, landing, header, [page.name for page in pages], target.now)
    assert header["next_chunk"] == next_chunk
    here, there = (adoption.read_at_rest(driver.engine, "a") for driver in (source, target))
    assert digest_of(here[0], prints(here[1])) == digest_of(there[0], prints(there[1]))
    adoption.thaw(target.engine, "a")
    made = target.chunks("a", before + 6 - next_chunk)
    assert equal(made, wanted[next_chunk:])


def test_what_did_not_change_is_told_from_what_did_after_any_number_of_chunks(
    make_driver: Callable[..., Any],
) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 4)
    frozen(driver)
    for chunks in (1, 2, 3, 5):
        _, before = adoption.read_at_rest(driver.engine, "a")
        old = prints(before)
        adoption.thaw(driver.engine, "a")
        driver.chunks("a", chunks)
        frozen(driver)
        _, after = adoption.read_at_rest(driver.engine, "a")
        new = prints(after)
        resent = {page.name for page in changed(after, {page.name: page.stamp for page in before})}
        different = {name for name in new if old.get(name) != new[name]}
        assert different <= resent
        assert len(resent) < len(new)


def test_a_prompt_switch_changes_the_pages_that_it_rewrites(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 4)
    frozen(driver)
    _, before = adoption.read_at_rest(driver.engine, "a")
    old = prints(before)
    driver.engine.control("a", Control(1, prompt="a blue square"))
    assert not driver.engine.has_work(driver.now) or driver.run() == []
    adoption.thaw(driver.engine, "a")
    driver.run(lambda _: driver.engine.table.sessions["a"].state.control_seq == 1)
    frozen(driver)
    _, after = adoption.read_at_rest(driver.engine, "a")
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
    adoption.freeze(driver.engine, "a", driver.now, 0.0, 0.0)
    made += [event for event in driver.run() if isinstance(event, ChunkReady)]
    assert not driver.engine.has_work(driver.now + 100)
    assert driver.engine.next_due(driver.now) is None
    adoption.thaw(driver.engine, "a")
    made += driver.chunks("a", 5 - len(made))
    assert equal(made, wanted)


def test_it_stands_still_when_the_viewer_has_enough_and_not_before(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=2.0)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 1)
    adoption.freeze(driver.engine, "a", driver.now, 0.3, 100.0)
    events = driver.run()
    made = [event.index for event in events if isinstance(event, ChunkReady)]
    assert [event.next_chunk for event in events if isinstance(event, Frozen)] == [made[-1] + 1]
    assert driver.engine.config.media_start(made[-1] + 1) >= 2.0


def test_it_takes_the_best_moment_that_there_is_between_two_chunks(make_driver: Callable[..., Any]) -> None:
    """Asked for more than there is, it ran on until patience ended, and stood still just before a chunk."""
    driver = make_driver(max_lead_s=2.0)
    driver.engine.admit(SPEC, driver.now)
    driver.run()
    adoption.freeze(driver.engine, "a", driver.now, 1.2, 3.0)
    began, events = driver.now, []
    while not events and driver.now < began + 5:
        driver.engine.playhead("a", driver.now - began, now=driver.now)
        events = [event for event in driver.run() if isinstance(event, Frozen)]
        driver.now += 0.05
    start_s = driver.engine.config.media_start(events[0].next_chunk)
    assert start_s - 2.0 - (driver.now - began) >= 0.5


def test_a_session_that_is_never_ahead_stands_still_once_patience_ends(
    make_driver: Callable[..., Any],
) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    adoption.freeze(driver.engine, "a", driver.now, 0.3, 0.05)
    events = driver.run()
    assert isinstance(events[-1], Frozen)
    assert driver.now >= 100.05


def test_a_suspended_session_moves_from_host_to_host_and_wakes_there(make_driver: Callable[..., Any]) -> None:
    wanted = stayed(make_driver, 8)
    source, target = (make_driver(max_lead_s=FAR) for _ in range(2))
    source.engine.admit(SPEC, source.now)
    source.chunks("a", 3)
    source.engine.suspend("a")
    events = source.run(lambda events: any(isinstance(event, Suspended) for event in events))
    next_chunk = next(event.next_chunk for event in events if isinstance(event, Suspended))
    header, pages = adoption.read_at_rest(source.engine, "a")
    landing = adoption.reserve(target.engine, on_host=True)
    copy(pages, landing)
    free = target.engine.free_slots
    adoption.adopt(target.engine, landing, header, [page.name for page in pages], target.now)
    assert target.engine.free_slots == free
    assert target.engine.snapshot("a").digest() == source.engine.snapshot("a").digest()
    target.engine.resume("a", target.now)
    assert equal(target.chunks("a", 8 - next_chunk), wanted[next_chunk:])
    target.engine.evict("a")
    assert target.engine.table.host_bytes_used == 0


def test_a_session_that_stood_still_can_be_suspended(make_driver: Callable[..., Any]) -> None:
    wanted = stayed(make_driver, 6)
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    made = driver.chunks("a", 2)
    adoption.freeze(driver.engine, "a", driver.now, 0.0, 0.0)
    made += [event for event in driver.run() if isinstance(event, ChunkReady)]
    adoption.thaw(driver.engine, "a")
    driver.engine.suspend("a")
    events = driver.run(lambda events: any(isinstance(event, Suspended) for event in events))
    assert not [event for event in events if isinstance(event, ChunkReady)]
    driver.engine.resume("a", driver.now)
    made += driver.chunks("a", 6 - len(made))
    assert equal(made, wanted)


def arrived(make_driver: Callable[..., Any]) -> tuple[Any, Landing, Mapping[str, Any], list[Page]]:
    """A target with all pages of a session that stands still elsewhere."""
    source, target = make_driver(max_lead_s=FAR), make_driver(slots=1, max_lead_s=FAR, host_bytes=1 << 10)
    source.engine.admit(SPEC, source.now)
    source.chunks("a", 2)
    frozen(source)
    header, pages = adoption.read_at_rest(source.engine, "a")
    landing = adoption.reserve(target.engine, on_host=False)
    copy(pages, landing)
    return target, landing, header, list(pages)


def test_reserved_memory_counts_and_comes_back(make_driver: Callable[..., Any]) -> None:
    target, landing, *_ = arrived(make_driver)
    with pytest.raises(SlabsExhausted):
        adoption.reserve(target.engine, on_host=False)
    adoption.release(target.engine, landing)
    assert target.engine.free_slots == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "another"}, "model"),
        ({"version": 99}, "version"),
        ({"next_chunk": 0}, "next_chunk"),
        ({"ring": {"slots": list(range(10)), "next": 3, "shift": 0}}, "slots"),
        ({"ring": {"slots": [0, 0], "next": 3, "shift": 0}}, "slots"),
        ({"ring": {"slots": list(range(9)), "next": 3, "shift": 0}}, "pages"),
    ],
)
def test_a_header_of_something_else_is_refused(
    make_driver: Callable[..., Any], change: dict[str, Any], field: str
) -> None:
    target, landing, header, pages = arrived(make_driver)
    with pytest.raises(SnapshotRejected) as caught:
        adoption.adopt(
            target.engine, landing, {**header, **change}, [page.name for page in pages], target.now
        )
    assert caught.value.field == field
    assert not target.engine.table.knows("a")


@pytest.mark.parametrize(
    ("name", "size", "dtype", "shape"),
    [
        ("keys/99", 1, "", ()),
        ("keys/-1", 1, "", ()),
        ("keys/0", 1, "", ()),
        ("model", 4, "float32", (1,)),
        ("decoder.x", 4, "object", (1,)),
        ("decoder.x", 4, "float32", (-1,)),
        ("decoder.x", 4 << 40, "float32", (1 << 40,)),
        ("decoder.x", 5, "float32", (1,)),
        ("../text", 4, "float32", (1,)),
    ],
)
def test_a_page_of_something_else_is_refused(
    make_driver: Callable[..., Any], name: str, size: int, dtype: str, shape: tuple[int, ...]
) -> None:
    _, landing, *_ = arrived(make_driver)
    with pytest.raises(SnapshotRejected):
        landing.place(name, size, dtype, shape)


@pytest.mark.parametrize("hashers", [1, 3])
def test_many_pages_hashed_at_once_have_the_fingerprints_of_each(
    monkeypatch: pytest.MonkeyPatch, hashers: int
) -> None:
    monkeypatch.setattr(moving, "HASHERS", hashers)
    monkeypatch.setattr(moving, "HASHED_AT_ONCE_BYTES", 1)
    pages = {str(n): [torch.full((1000,), n, dtype=torch.uint8), torch.zeros(n)] for n in range(20)}
    assert fingerprints_of(pages) == {name: fingerprint_of(page) for name, page in pages.items()}
    assert len(set(fingerprints_of(pages).values())) == 20


@pytest.mark.parametrize("hashers", [1, 3])
def test_hashing_a_large_state_ends_when_nobody_wants_it_any_more(
    monkeypatch: pytest.MonkeyPatch, hashers: int
) -> None:
    monkeypatch.setattr(moving, "HASHERS", hashers)
    monkeypatch.setattr(moving, "HASHED_AT_ONCE_BYTES", 1)
    monkeypatch.setattr(moving, "HASHED_UNASKED_BYTES", 100)
    deadline, asked = Deadline(60.0), 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 5:
            deadline.abort()
        deadline.left()

    page = [torch.arange(10_000, dtype=torch.int32).view(torch.uint8)]
    whole = fingerprint_of(page)
    monkeypatch.setattr(moving, "HASHED_UNASKED_BYTES", 7)
    assert fingerprint_of(page) == whole
    with pytest.raises(Aborted):
        fingerprints_of({"a": page, "b": page, "c": page}, check)
    # Each of them asks once more at most.
    assert asked <= 5 + hashers


def test_a_session_that_is_here_already_is_not_adopted_again(make_driver: Callable[..., Any]) -> None:
    target, landing, header, pages = arrived(make_driver)
    adoption.adopt(target.engine, landing, header, [page.name for page in pages], target.now)
    with pytest.raises(DuplicateSession):
        adoption.adopt(target.engine, landing, header, [page.name for page in pages], target.now)


def test_a_full_host_refuses_a_suspended_session_before_anything_is_copied(
    make_driver: Callable[..., Any],
) -> None:
    target = make_driver(host_bytes=1 << 10)
    with pytest.raises(HostPoolFull):
        adoption.reserve(target.engine, on_host=True)
    assert target.engine.table.host_bytes_used == 0


def asleep(make_driver: Callable[..., Any], chunks: int = 3) -> tuple[Any, Mapping[str, Any], list[Page]]:
    """A source whose session is suspended: header and pages."""
    source = make_driver(max_lead_s=FAR)
    source.engine.admit(SPEC, source.now)
    source.chunks("a", chunks)
    source.engine.suspend("a")
    source.run(lambda events: any(isinstance(event, Suspended) for event in events))
    header, pages = adoption.read_at_rest(source.engine, "a")
    return source, header, list(pages)


@pytest.mark.parametrize("chunks", [1, 7])
def test_a_session_that_arrives_suspended_is_counted_by_the_host_and_stays_where_it_was_put(
    make_driver: Callable[..., Any], chunks: int
) -> None:
    """It was put down beside the host's memory, and copied there twice while the engine did nothing else."""
    source, header, pages = asleep(make_driver, chunks)
    target = make_driver(max_lead_s=FAR)
    host = target.engine.table.host
    landing = adoption.reserve(target.engine, on_host=True)
    reserved = host.used_bytes
    assert reserved >= source.engine.snapshot("a").total_bytes
    places = {}
    for page in pages:
        places[page.name] = landing.place(page.name, page.size, page.dtype, page.shape)
    copy(pages, landing)
    adoption.adopt(target.engine, landing, header, [page.name for page in pages], target.now)
    snapshot = target.engine.snapshot("a")
    assert snapshot.digest() == source.engine.snapshot("a").digest()
    for name in ("keys", "text_keys", "generator"):
        first = places[f"{name}/0" if name == "keys" else name][0]
        assert snapshot.tensors[name].data_ptr() == first.data_ptr()
    assert source.engine.snapshot("a").total_bytes <= host.used_bytes < reserved
    target.engine.evict("a")
    assert host.used_bytes == 0


def test_an_aborted_arrival_gives_the_hosts_memory_back(make_driver: Callable[..., Any]) -> None:
    _, _, pages = asleep(make_driver)
    target = make_driver()
    landing = adoption.reserve(target.engine, on_host=True)
    copy(pages[:5], landing)
    assert target.engine.table.host_bytes_used > 0
    adoption.release(target.engine, landing)
    assert target.engine.table.host_bytes_used == 0


@pytest.mark.parametrize("on_host", [False, True])
def test_what_broken_attempts_have_brought_does_not_pile_up(
    make_driver: Callable[..., Any], on_host: bool
) -> None:
    _, header, pages = asleep(make_driver)
    target = make_driver()
    landing = adoption.reserve(target.engine, on_host=on_host)
    shape = target.engine.config.latent_shape
    size = 4 * torch.Size(shape).numel()
    for attempt in range(100):
        landing.begin()
        landing.place(f"recent/{attempt}", size, "float32", shape)
        landing.place(f"decoder.{attempt}", 40, "float32", (10,))
    assert landing.own_bytes == size + 40
    landing.begin()
    copy(pages, landing)
    adoption.adopt(target.engine, landing, header, [page.name for page in pages], target.now)


def test_only_a_session_at_rest_can_be_read_whole(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 1)
    with pytest.raises(UnknownSession):
        adoption.read_at_rest(driver.engine, "a")


def test_a_page_is_flat_bytes_of_the_sessions_own_memory(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 2)
    frozen(driver)
    _, pages = adoption.read_at_rest(driver.engine, "a")
    slab = driver.engine.table.sessions["a"].state.slab
    page = next(page for page in pages if page.name == "keys/1")
    assert [part.dtype for part in page.parts] == [torch.uint8] * slab.keys.shape[0]
    first: Tensor = page.parts[0]
    assert first.data_ptr() == slab.keys[0, 1].data_ptr()
