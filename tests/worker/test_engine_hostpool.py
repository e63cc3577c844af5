"""The host pool: never more than its bytes, no overlap, no leak."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.worker.engine.errors import HostMemoryUnavailableError, HostPoolFullError
from turboserve.worker.engine.interface import ChunkReady, SessionSpec, Suspended, SuspendRefused
from turboserve.worker.engine.memory import ALIGNMENT, Extent, HostPool, aligned, size_of
from turboserve.worker.engine.state_transfer import PIECE_BYTES, pieces


def largest_gap(held: list[Extent], limit: int) -> int:
    gaps, at = [0], 0
    for extent in sorted(held, key=lambda piece: piece.start):
        gaps.append(extent.start - at)
        at = extent.start + extent.size
    return max(*gaps, limit - at)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 20_000),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5_000), st.integers(0, 30)), max_size=60),
)
def test_pieces_fit_do_not_overlap_and_come_back(limit: int, calls: list[tuple[bool, int, int]]) -> None:
    pool = HostPool(limit, pinned=False)
    held: list[Extent] = []
    for take, size, which in calls:
        if not take and held:
            pool.give_back(held.pop(which % len(held)))
        elif take and aligned(max(size, 1)) > largest_gap(held, limit):
            with pytest.raises(HostPoolFullError):
                pool.take(size)
        elif take:
            held.append(pool.take(size))
            assert size <= held[-1].size < max(size, 1) + ALIGNMENT
        ends = sorted((extent.start, extent.start + extent.size) for extent in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert all(0 <= start < end <= limit for start, end in ends)
        assert pool.used_bytes == sum(extent.size for extent in held) <= limit
    for extent in held:
        pool.give_back(extent)
    assert pool.used_bytes == 0
    if limit >= ALIGNMENT:
        # In one piece again, in any order of the releases.
        assert pool.take(limit // ALIGNMENT * ALIGNMENT).start == 0


def test_a_piece_is_not_taken_back_twice() -> None:
    pool = HostPool(4096, pinned=False)
    extent = pool.take(100)
    pool.give_back(extent)
    with pytest.raises(RuntimeError, match="given back twice"):
        pool.give_back(extent)


def test_tensors_in_a_piece_are_apart_and_exact() -> None:
    pool = HostPool(1 << 16, pinned=False)
    like = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.uint8), "c": torch.empty(0, 4)}
    placed = pool.tensors(pool.take(size_of(like)), like)
    for name, tensor in like.items():
        placed[name].copy_(tensor)
    for name, tensor in like.items():
        assert torch.equal(placed[name], tensor)
        assert placed[name].is_contiguous()


def test_memory_that_the_machine_does_not_give_is_a_typed_error() -> None:
    pool = HostPool(1 << 60, pinned=False)
    with pytest.raises(HostMemoryUnavailableError, match=f"{1 << 60} bytes could not be allocated"):
        pool.tensors(pool.take(1), {"a": torch.empty(1)})


def test_what_is_not_contiguous_is_copied_in_parts_that_are() -> None:
    slab = torch.randn(4, 6, 3)
    source, target = slab[:, :2], torch.empty(4, 2, 3)
    parts = list(pieces(target, source))
    assert len(parts) == 4
    assert all(a.is_contiguous() and b.is_contiguous() for a, b in parts)
    for a, b in parts:
        a.copy_(b)
    assert torch.equal(target, source)
    large = torch.empty(3, PIECE_BYTES // 4, dtype=torch.float32)
    assert len(list(pieces(large, large))) == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_pool_refuses_and_its_bytes_return(make_driver: Callable[..., Any], overlap: bool) -> None:
    driver = make_driver(slabs=2, max_lead_s=1.0, overlap=overlap)
    for name in ("a", "b"):
        driver.engine.admit(SessionSpec(name, "a red circle"), driver.now)
    driver.run()
    driver.engine.suspend("a")
    [left] = [event for event in driver.run() if isinstance(event, Suspended)]
    room = driver.engine.host_bytes_used
    assert left.host_bytes <= room < left.host_bytes + 64 * ALIGNMENT

    # Room for one, also once its window has grown, and not for two.
    limit = 2 * room - 1
    tight = make_driver(slabs=2, max_lead_s=1.0, overlap=overlap, host_bytes=limit)
    for name in ("a", "b"):
        tight.engine.admit(SessionSpec(name, "a red circle"), tight.now)
    tight.run()
    for name in ("a", "b"):
        tight.engine.suspend(name)
    events = tight.run()
    assert [event.session for event in events if isinstance(event, Suspended)] == ["a"]
    [refused] = [event for event in events if isinstance(event, SuspendRefused)]
    assert refused.session == "b"
    assert f"{limit - room} of {limit} free" in refused.reason
    # The refused one continues, and has the place once the other has left.
    tight.engine.playhead("b", 1.0, now=tight.now, playing=False)
    assert [event.session for event in tight.run() if isinstance(event, ChunkReady)] == ["b"]
    tight.engine.resume("a", tight.now)
    tight.run()
    assert tight.engine.host_bytes_used == 0
    tight.engine.suspend("b")
    assert [event.session for event in tight.run() if isinstance(event, Suspended)] == ["b"]
    for name in ("a", "b"):
        tight.engine.evict(name)
    assert tight.engine.host_bytes_used == 0
    assert tight.engine.free_slabs == 2
