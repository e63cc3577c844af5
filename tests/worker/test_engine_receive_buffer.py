"""The arrival of a session: memory reserved for it, refusals, and the release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.state_page_helpers import FAR, SPEC, copy, frozen
from turboserve.worker.engine import page_hashing, state_pages
from turboserve.worker.engine.errors import (
    DuplicateSessionError,
    HostPoolFullError,
    SlabsExhaustedError,
    SnapshotRejectedError,
    UnknownSessionError,
)
from turboserve.worker.engine.interface import Suspended
from turboserve.worker.engine.page_hashing import PageHasher
from turboserve.worker.engine.receive_buffer import PagedReceiveBuffer
from turboserve.worker.engine.state_pages import Page, fingerprint_of
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import TransferAbortedError


def arrived(make_driver: Callable[..., Any]) -> tuple[Any, PagedReceiveBuffer, Mapping[str, Any], list[Page]]:
    """Return a target with all pages of a session that is quiesced at the source."""
    source, target = make_driver(max_lead_s=FAR), make_driver(slabs=1, max_lead_s=FAR, host_bytes=1 << 10)
    source.engine.admit(SPEC, source.now)
    source.chunks("a", 2)
    frozen(source)
    header, pages = source.engine.export_session("a")
    buffer = target.engine.reserve(on_host=False)
    copy(pages, buffer)
    return target, buffer, header, list(pages)


def test_reserved_memory_counts_and_comes_back(make_driver: Callable[..., Any]) -> None:
    target, buffer, *_ = arrived(make_driver)
    with pytest.raises(SlabsExhaustedError):
        target.engine.reserve(on_host=False)
    target.engine.release(buffer)
    assert target.engine.free_slabs == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "another"}, "model"),
        ({"version": 99}, "version"),
        ({"next_chunk": 0}, "next_chunk"),
        ({"ring": {"slots": list(range(10)), "next": 3, "shift": 0}}, "ring frames"),
        ({"ring": {"slots": [0, 0], "next": 3, "shift": 0}}, "ring frames"),
        ({"ring": {"slots": list(range(9)), "next": 3, "shift": 0}}, "pages"),
    ],
)
def test_a_header_of_something_else_is_refused(
    make_driver: Callable[..., Any], change: dict[str, Any], field: str
) -> None:
    target, buffer, header, pages = arrived(make_driver)
    with pytest.raises(SnapshotRejectedError) as caught:
        target.engine.import_session(buffer, {**header, **change}, [page.name for page in pages], target.now)
    assert caught.value.field == field
    assert not target.engine.knows("a")


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
    _, buffer, *_ = arrived(make_driver)
    with pytest.raises(SnapshotRejectedError):
        buffer.place(name, size, dtype, shape)


@pytest.mark.parametrize("hashers", [1, 3])
def test_many_pages_hashed_at_once_have_the_fingerprints_of_each(
    monkeypatch: pytest.MonkeyPatch, hashers: int
) -> None:
    monkeypatch.setattr(page_hashing, "HASHERS", hashers)
    monkeypatch.setattr(page_hashing, "HASHED_AT_ONCE_BYTES", 1)
    pages = {
        str(n): [torch.full((1000,), n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)]
        for n in range(20)
    }
    with PageHasher(pages) as hasher:
        prints = hasher.prints()
    assert prints == {name: fingerprint_of(page) for name, page in pages.items()}
    assert len(set(prints.values())) == 20


@pytest.mark.parametrize("at_once_bytes", [1, 1 << 20])
def test_a_page_is_hashed_only_once_all_its_bytes_are_there(
    monkeypatch: pytest.MonkeyPatch, at_once_bytes: int
) -> None:
    monkeypatch.setattr(page_hashing, "HASHED_AT_ONCE_BYTES", at_once_bytes)
    pages = {
        str(n): [torch.zeros(500, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8)] for n in range(3)
    }
    wanted = {str(n): fingerprint_of([torch.full((1000,), n + 1, dtype=torch.uint8)]) for n in range(3)}
    with PageHasher(pages) as hasher:
        for number, parts in enumerate(pages.values()):
            for half, part in enumerate(parts):
                part.fill_(number + 1)
                # One byte less than what is there.
                hasher.arrived(1000 * number + 500 * (half + 1) - 1)
        assert hasher.prints() == wanted


@pytest.mark.parametrize("hashers", [1, 3])
def test_hashing_a_large_state_ends_when_the_copy_is_aborted(
    monkeypatch: pytest.MonkeyPatch, hashers: int
) -> None:
    monkeypatch.setattr(page_hashing, "HASHERS", hashers)
    monkeypatch.setattr(page_hashing, "HASHED_AT_ONCE_BYTES", 1)
    monkeypatch.setattr(state_pages, "HASHED_UNASKED_BYTES", 100)
    # One step of a counter is atomic: several threads poll at once.
    deadline, polls = Deadline(60.0), count(1)

    def check() -> None:
        if next(polls) >= 5:
            deadline.abort()
        deadline.left()

    page = [torch.arange(10_000, dtype=torch.int32).view(torch.uint8)]
    whole = fingerprint_of(page)
    monkeypatch.setattr(state_pages, "HASHED_UNASKED_BYTES", 7)
    assert fingerprint_of(page) == whole
    with (
        pytest.raises(TransferAbortedError),
        PageHasher({"a": page, "b": page, "c": page}, check) as hasher,
    ):
        hasher.prints()
    # Each page polls once more at most, also one that begins before the others are canceled.
    assert next(polls) - 1 <= 5 + 3


def test_a_session_that_is_here_already_is_not_adopted_again(make_driver: Callable[..., Any]) -> None:
    target, buffer, header, pages = arrived(make_driver)
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    with pytest.raises(DuplicateSessionError):
        target.engine.import_session(buffer, header, [page.name for page in pages], target.now)


def test_a_full_host_refuses_a_suspended_session_before_anything_is_copied(
    make_driver: Callable[..., Any],
) -> None:
    target = make_driver(host_bytes=1 << 10)
    with pytest.raises(HostPoolFullError):
        target.engine.reserve(on_host=True)
    assert target.engine.host_bytes_used == 0


def suspended(make_driver: Callable[..., Any], chunks: int = 3) -> tuple[Any, Mapping[str, Any], list[Page]]:
    """Return a source whose session is suspended, with header and pages."""
    source = make_driver(max_lead_s=FAR)
    source.engine.admit(SPEC, source.now)
    source.chunks("a", chunks)
    source.engine.suspend("a")
    source.run(lambda events: any(isinstance(event, Suspended) for event in events))
    header, pages = source.engine.export_session("a")
    return source, header, list(pages)


@pytest.mark.parametrize("chunks", [1, 7])
def test_a_session_that_arrives_suspended_is_counted_by_the_host_and_stays_where_it_was_put(
    make_driver: Callable[..., Any], chunks: int
) -> None:
    """Incident: it was stored beside the host's memory, and copied there twice while the engine waited."""
    source, header, pages = suspended(make_driver, chunks)
    target = make_driver(max_lead_s=FAR)
    host = target.engine.backend.host
    buffer = target.engine.reserve(on_host=True)
    reserved = host.used_bytes
    assert reserved >= source.engine.snapshot("a").total_bytes
    places = {}
    for page in pages:
        places[page.name] = buffer.place(page.name, page.size, page.dtype, page.shape)
    copy(pages, buffer)
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    snapshot = target.engine.snapshot("a")
    assert snapshot.digest() == source.engine.snapshot("a").digest()
    for name in ("keys", "text_keys", "generator"):
        first = places[f"{name}/0" if name == "keys" else name][0]
        assert snapshot.tensors[name].data_ptr() == first.data_ptr()
    assert source.engine.snapshot("a").total_bytes <= host.used_bytes < reserved
    target.engine.evict("a")
    assert host.used_bytes == 0


def test_an_aborted_arrival_gives_the_hosts_memory_back(make_driver: Callable[..., Any]) -> None:
    _, _, pages = suspended(make_driver)
    target = make_driver()
    buffer = target.engine.reserve(on_host=True)
    copy(pages[:5], buffer)
    assert target.engine.host_bytes_used > 0
    target.engine.release(buffer)
    assert target.engine.host_bytes_used == 0


@pytest.mark.parametrize("on_host", [False, True])
def test_what_broken_attempts_have_brought_does_not_pile_up(
    make_driver: Callable[..., Any], on_host: bool
) -> None:
    _, header, pages = suspended(make_driver)
    target = make_driver()
    buffer = target.engine.reserve(on_host=on_host)
    shape = target.engine.config.latent_shape
    size = 4 * torch.Size(shape).numel()
    for attempt in range(100):
        buffer.begin()
        buffer.place(f"recent/{attempt}", size, "float32", shape)
        buffer.place(f"decoder.{attempt}", 40, "float32", (10,))
    assert buffer.own_bytes == size + 40
    buffer.begin()
    copy(pages, buffer)
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)


def test_only_a_session_at_rest_can_be_read_whole(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 1)
    with pytest.raises(UnknownSessionError):
        driver.engine.export_session("a")


def test_a_page_is_flat_bytes_of_the_sessions_own_memory(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(max_lead_s=FAR)
    driver.engine.admit(SPEC, driver.now)
    driver.chunks("a", 2)
    frozen(driver)
    _, pages = driver.engine.export_session("a")
    slab = driver.engine.sessions["a"].state.slab
    page = next(page for page in pages if page.name == "keys/1")
    assert [part.dtype for part in page.parts] == [torch.uint8] * slab.keys.shape[0]
    first: Tensor = page.parts[0]
    assert first.data_ptr() == slab.keys[0, 1].data_ptr()
