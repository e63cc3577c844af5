"""How workers are divided into roles: never worse than workers that do both, and better only by memory."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.allocation.roles import (
    RoleCapacity,
    RoleSplit,
    best_split,
    chunks_per_s,
    in_turns,
    neustream_chunks_per_s,
    neustream_split,
    partial_slos,
)

PLENTY = 10**6


def test_a_stage_s_rate_is_that_of_its_best_batch() -> None:
    latency_s = {1: 0.1, 2: 0.15, 4: 0.4}
    assert chunks_per_s(latency_s) == pytest.approx(2 / 0.15)
    # Five forwards for each chunk.
    assert chunks_per_s(latency_s, visits=5) == pytest.approx(2 / 0.75)


def test_neustream_s_formula_counts_each_batch_with_the_whole_slo() -> None:
    latency_s = {1: 0.1, 2: 0.15, 4: 0.4}
    # Two end within 0.3 s, after half of it: half of the true rate. Four do not.
    assert neustream_chunks_per_s(latency_s, 0.3) == pytest.approx(2 / 0.3)
    assert neustream_chunks_per_s(latency_s, 0.3) == pytest.approx(chunks_per_s(latency_s) / 2)
    assert neustream_chunks_per_s(latency_s, 0.4, visits=5) == pytest.approx(4 / (0.4 * 5))
    assert neustream_chunks_per_s(latency_s, 0.05) == 0.0


def test_partial_slos_are_divided_by_latency_and_add_up() -> None:
    slos = partial_slos({"denoise": 0.02, "decode": 0.1}, {"denoise": 5, "decode": 1}, 0.8)
    assert slos == pytest.approx({"denoise": 0.08, "decode": 0.4})
    assert 5 * slos["denoise"] + slos["decode"] == pytest.approx(0.8)


@given(st.integers(2, 40), st.floats(0.1, 50.0), st.floats(0.1, 50.0))
def test_neustream_s_split_has_the_largest_least_rate(workers: int, denoise: float, decode: float) -> None:
    split = neustream_split(workers, {"denoise": denoise, "decode": decode})
    assert split["denoise"] + split["decode"] == workers
    least = min(split["denoise"] * denoise, split["decode"] * decode)
    best = max(min(a * denoise, (workers - a) * decode) for a in range(1, workers))
    assert least == pytest.approx(best)


def test_neustream_s_split_needs_a_worker_for_each_stage() -> None:
    with pytest.raises(ValueError, match="workers"):
        neustream_split(1, {"denoise": 1.0, "decode": 1.0})


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
