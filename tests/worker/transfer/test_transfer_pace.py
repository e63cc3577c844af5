"""Time allowed for a copy, by its size and the measured pace of its link."""

from __future__ import annotations

import pytest

from turboserve.worker.transfer.pace import HOSTS_KEPT, SLACK, CopyLimits, CopyRate
from turboserve.worker.transfer.target import host_of

LIMITS = CopyLimits(least_s=20.0, most_s=3_600.0, bytes_per_s=10e6)
GB = 1_000_000_000


def test_a_state_has_the_longer_the_larger_it_is_between_two_bounds() -> None:
    pace = CopyRate(LIMITS)
    assert pace.limit_s("a", 0) == 20.0
    assert pace.limit_s("a", GB) == 20.0 + SLACK * 100
    assert pace.limit_s("a", 20 * GB) == 3_600.0


def test_twenty_gigabytes_have_time_for_a_gigabit_a_second_even_unmeasured() -> None:
    assert CopyRate(LIMITS).limit_s("a", 20 * GB) > 20 * GB / 125e6


def test_what_was_measured_takes_the_place_of_what_was_assumed_and_the_slowest_counts() -> None:
    pace = CopyRate(LIMITS)
    for seconds in (1.0, 4.0, 2.0):
        pace.took("near", GB, seconds)
    assert pace.limit_s("near", GB) == 20.0 + SLACK * 4
    assert pace.limit_s("far", GB) == 20.0 + SLACK * 100
    pace.took("far", GB, 500.0)
    assert pace.limit_s("far", GB) == 20.0 + SLACK * 500


def test_after_a_failure_the_rate_is_not_trusted_and_the_limit_never_falls() -> None:
    pace = CopyRate(LIMITS)
    pace.took("fast", GB, 0.1)
    pace.took("slow", GB, 0.1)
    pace.took("slow", GB, 500.0)
    for host in ("fast", "slow", "never heard of"):
        pace.forget(host)
    assert pace.limit_s("fast", GB) == 20.0 + SLACK * 100
    assert pace.limit_s("slow", GB) == 20.0 + SLACK * 500
    assert pace.limit_s("never heard of", GB) == 20.0 + SLACK * 100


def test_nothing_is_learnt_from_nothing_and_hosts_that_went_are_forgotten() -> None:
    pace = CopyRate(LIMITS)
    pace.took("a", 0, 1.0)
    pace.took("a", GB, 0.0)
    assert pace.limit_s("a", GB) == 20.0 + SLACK * 100
    pace.took("first", GB, 1.0)
    for number in range(HOSTS_KEPT):
        pace.took(str(number), GB, 1.0)
    assert pace.limit_s("first", GB) == 20.0 + SLACK * 100
    assert pace.limit_s("0", GB) == 20.0 + SLACK


@pytest.mark.parametrize(
    ("sources", "host"),
    [
        (("tcp://near:4711?backend=gloo", "tcp://far:4711"), "near"),
        (("tcp://[::1]:4711",), "::1"),
        (("tcp://[::1",), ""),
        (("nonsense",), ""),
        ((), ""),
    ],
)
def test_an_invalid_address_names_no_host(sources: tuple[str, ...], host: str) -> None:
    assert host_of(sources) == host
