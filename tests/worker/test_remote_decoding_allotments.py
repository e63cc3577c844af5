"""How many sessions a worker may count on its decode workers for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turboserve.worker.remote_decoding.allotments import KEPT_S, SILENT_S, AllottedSessions, DividedSessions
from turboserve.worker.remote_decoding.chunk_time import SAMPLES, ChunkTime

V, W = "tcp://v:1", "tcp://w:1"


def test_workers_have_parts_by_their_k() -> None:
    divided = DividedSessions(12)
    divided.heard("a", "first", 4, 0.0)
    assert divided.allotment("a", 0.0) == 12
    divided.heard("b", "second", 2, 0.0)
    assert [divided.allotment(name, 0.0) for name in "ab"] == [8, 4]
    assert divided.allotment("c", 0.0) == 0


def test_who_has_left_or_is_silent_has_no_part() -> None:
    divided, first, second = DividedSessions(12), object(), object()
    divided.heard("a", first, 4, 0.0)
    divided.heard("b", second, 4, 0.0)
    assert divided.allotment("a", 0.0) == 6
    divided.left("b", second)
    assert divided.allotment("a", 0.0) == 12
    divided.heard("b", second, 4, 1.0)
    divided.heard("a", first, 4, SILENT_S)
    assert divided.allotment("a", SILENT_S + 1.0) == 6
    assert divided.allotment("a", SILENT_S + 1.1) == 12


def test_a_connection_that_closes_late_does_not_end_the_newer_one() -> None:
    divided, first, second = DividedSessions(12), object(), object()
    divided.heard("a", first, 4, 0.0)
    divided.heard("a", second, 4, 1.0)
    divided.left("a", first)
    assert divided.allotment("a", 1.0) == 12
    divided.left("a", second)
    assert divided.allotment("a", 1.0) == 0


@given(
    st.integers(0, 200),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 40), min_size=1),
)
def test_all_that_there_is_is_allotted(sessions: int, capacities: dict[str, int]) -> None:
    divided = DividedSessions(sessions)
    for name, capacity in capacities.items():
        divided.heard(name, name, capacity, 0.0)
    parts = {name: divided.allotment(name, 0.0) for name in capacities}
    assert sum(parts.values()) == sessions
    total = sum(capacities.values())
    for name, capacity in capacities.items():
        assert abs(parts[name] - sessions * capacity / total) < 1


def test_not_the_same_workers_have_one_session_more_everywhere() -> None:
    found = set()
    for number in range(8):
        divided = DividedSessions(5, f"dec_{number}")
        for name in "ab":
            divided.heard(name, name, 4, 0.0)
        found.add((divided.allotment("a", 0.0), divided.allotment("b", 0.0)))
    assert found == {(2, 3), (3, 2)}


def test_nothing_limits_a_worker_until_its_decode_workers_are_known() -> None:
    allotted = AllottedSessions([V, W], 2, 100.0)
    assert allotted.limit(100.0) is None
    allotted.set_allotment(V, "v", 5)
    assert allotted.limit(101.0) is None
    allotted.set_allotment(W, "w", 3)
    assert allotted.limit(102.0) == 8
    # One that does not come counts nothing, and the worker itself decodes two.
    alone = AllottedSessions([V, W], 2, 100.0)
    alone.set_allotment(V, "v", 5)
    assert alone.limit(100.1 + KEPT_S) == 5
    assert AllottedSessions([V], 2, 100.0).limit(100.1 + KEPT_S) == 2


def test_a_lost_decode_worker_counts_until_its_successor_should_be_there() -> None:
    allotted = AllottedSessions([V, W], 2, 0.0)
    for address in (V, W):
        allotted.set_allotment(address, address, 4)
    allotted.lost(W, 100.0)
    allotted.lost(W, 120.0)
    assert allotted.limit(100.0 + KEPT_S) == 8
    assert allotted.limit(100.1 + KEPT_S) == 4
    allotted.set_allotment(W, "w", 6)
    assert allotted.limit(1e6) == 10
    for address in (V, W):
        allotted.lost(address, 2e6)
    assert allotted.limit(3e6) == 2


def test_what_decode_workers_carry_is_known_as_their_allotments_are() -> None:
    allotted = AllottedSessions([V, W], 2, 0.0)
    allotted.set_allotment(V, "v", 4, 12)
    assert allotted.carried(0.0) is None
    # One of an earlier version does not say what it carries.
    allotted.set_allotment(W, "w", 5)
    assert allotted.carried(0.0) == {"v": 12, "w": 5}
    allotted.lost(V, 100.0)
    assert allotted.carried(100.0 + KEPT_S) == {"v": 12, "w": 5}
    assert allotted.carried(100.1 + KEPT_S) == {"w": 5}


def test_a_chunk_takes_what_the_fastest_of_the_newest_took() -> None:
    time = ChunkTime(1.0)
    # A few slow ones are noise.
    assert not any(time.observe(3.0) for _ in range(SAMPLES - 1))
    assert time.observe(2.0)
    assert time.seconds == 2.0
    # The worker has recovered: the slow ones are older. Less than a tenth is no change.
    changes = [time.observe(1.9 if number < SAMPLES else 1.0) for number in range(2 * SAMPLES)]
    assert [number for number, changed in enumerate(changes) if changed] == [SAMPLES]
    assert time.seconds == 1.0
    # What was measured on purpose replaces all of them.
    assert not time.probed(1.05)
    assert time.probed(4.0)
    assert not any(time.observe(1.0) for _ in range(SAMPLES - 1))
    assert time.observe(4.5)
    assert time.seconds == 1.0
