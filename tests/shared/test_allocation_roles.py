"""How workers are divided into roles: never worse than workers that do both, and better only by memory."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.allocation.roles import RoleCapacity, RoleSplit, best_split, chunks_per_s, in_turns

PLENTY = 10**6


def test_a_stage_s_rate_is_that_of_its_best_batch() -> None:
    latency_s = {1: 0.1, 2: 0.15, 4: 0.4}
    assert chunks_per_s(latency_s) == pytest.approx(2 / 0.15)
    # Five forwards for each chunk.
    assert chunks_per_s(latency_s, visits=5) == pytest.approx(2 / 0.75)


def test_memory_is_what_makes_a_split_carry_more() -> None:
    # A session takes 5 GB, 2 of them for the decoder's cache, of 40 GB.
    both = RoleCapacity(in_turns(100.0, 100.0), 8)
    denoise, decode = RoleCapacity(100.0, 13), RoleCapacity(100.0, 20)
    assert best_split(5, denoise, decode, both, 1.0).sessions == 40
    # Two decoders hold 40 caches, three denoisers 39 states: all five doing both carry as many.
    assert best_split(5, denoise, decode, both, 1.0).decode == 0
    unlimited = RoleCapacity(100.0, 60)
    assert best_split(5, denoise, unlimited, both, 1.0) == RoleSplit(4, 1, 52)


def test_one_worker_does_both() -> None:
    alone = RoleCapacity(10.0, PLENTY)
    assert best_split(1, alone, alone, RoleCapacity(5.0, PLENTY), 0.75) == RoleSplit(1, 0, 3)


RATES = st.floats(0.5, 200.0)


@given(st.integers(1, 12), RATES, RATES, st.floats(0.2, 2.0))
def test_in_computing_time_alone_no_split_carries_more(
    workers: int, denoise: float, decode: float, chunk_s: float
) -> None:
    found = best_split(
        workers,
        RoleCapacity(denoise, PLENTY),
        RoleCapacity(decode, PLENTY),
        RoleCapacity(in_turns(denoise, decode), PLENTY),
        chunk_s,
    )
    assert (found.denoise, found.decode) == (workers, 0)


@given(
    st.integers(1, 10),
    *(st.tuples(st.integers(1, 60), st.integers(1, 40)) for _ in range(3)),
)
def test_no_other_split_carries_more(
    workers: int, denoise: tuple[int, int], decode: tuple[int, int], both: tuple[int, int]
) -> None:
    first, second, third = (RoleCapacity(float(rate), room) for rate, room in (denoise, decode, both))
    found = best_split(workers, first, second, third, 1.0)
    assert found.denoise + found.decode == workers

    def carried(role: tuple[int, int], count: int) -> Fraction:
        return Fraction(min(count * role[0], count * role[1]))

    splits = [min(carried(denoise, workers - n), carried(decode, n)) for n in range(1, workers)]
    assert found.sessions == max([carried(both, workers), *splits])
