"""The rules of room in the log, over their whole space of inputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turboserve.contracts.canaries import SpaceLevel
from turboserve.state_store.core.space import (
    GAP,
    Disk,
    Shares,
    disk_level,
    excess,
    oldest_part,
    shortened,
    stream_level,
    worst,
)

SHARES = Shares(0.8, 0.9, 0.95)
LEVELS = list(SpaceLevel)
BYTES = st.integers(0, 2**45)


@given(st.integers(1, 2**45), BYTES, BYTES)
def test_a_fuller_stream_is_never_at_a_better_level(limit: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    levels = [stream_level(used, limit, SHARES) for used in (low, high)]
    assert LEVELS.index(levels[0]) <= LEVELS.index(levels[1])
    assert stream_level(limit, limit, SHARES) is SpaceLevel.FULL


def test_a_stream_without_a_limit_and_a_disk_elsewhere_say_nothing() -> None:
    assert stream_level(10**12, 0, SHARES) is SpaceLevel.ENOUGH
    assert disk_level(None, 10**9) is SpaceLevel.ENOUGH


@given(st.integers(1, 2**45), st.integers(2**20, 2**40), st.data())
def test_a_fuller_disk_is_never_at_a_better_level(total: int, reserve: int, data: st.DataObject) -> None:
    frees = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    levels = [disk_level(Disk(free, total), reserve) for free in frees]
    assert LEVELS.index(levels[0]) >= LEVELS.index(levels[1])
    assert disk_level(Disk(total, total), reserve) is SpaceLevel.ENOUGH
    if total >= 100:
        assert disk_level(Disk(0, total), reserve) is SpaceLevel.FULL


@given(st.integers(1, 2**45), BYTES, st.floats(0.01, 1.0))
def test_what_is_removed_brings_a_stream_below_where_removal_began(
    limit: int, used: int, begins: float
) -> None:
    left = used - excess(used, limit, begins)
    assert left <= used
    assert left <= max(0.0, begins - GAP) * limit + 1 or excess(used, limit, begins) == 0
    if used >= begins * limit and used > 0 and limit >= 100:
        assert left < begins * limit


@given(st.dictionaries(st.text(max_size=4), st.integers(0, 500), max_size=30), st.integers(8, 100))
def test_shortening_ends_at_the_floor_and_cuts_the_longest_first(counts: dict[str, int], floor: int) -> None:
    counts = dict(counts)
    rounds = 0
    while cuts := shortened(counts, floor):
        longest = max(counts.values())
        for subject, keep in cuts.items():
            assert floor <= keep < counts[subject]
            assert counts[subject] > longest // 2
        counts |= cuts
        rounds += 1
        assert rounds < 40
    assert all(count <= floor for count in counts.values())


@given(st.integers(1, 10**9), st.integers(0, 10**6), st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_newest_event_always_stays(first: int, length: int, used: int, remove: int) -> None:
    last = first + length
    keep_from = oldest_part(first, last, used, remove)
    assert first <= keep_from <= last
    if remove and used and length:
        assert keep_from > first


@given(st.lists(st.sampled_from(LEVELS)))
def test_the_worst_level_counts(levels: list[SpaceLevel]) -> None:
    assert all(LEVELS.index(level) <= LEVELS.index(worst(levels)) for level in levels)
