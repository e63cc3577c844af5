"""The delay before a repetition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turboserve.backoff import backoff_s


def test_the_delay_begins_at_the_first_one_and_doubles_up_to_the_limit() -> None:
    assert [backoff_s(failures, 0.5, 3.0) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.integers(1, 10**9), st.floats(1e-3, 10.0), st.floats(10.0, 1e4))
def test_any_number_of_failures_gives_a_delay_within_the_limits(
    failures: int, first_s: float, limit_s: float
) -> None:
    delay_s = backoff_s(failures, first_s, limit_s)
    assert first_s <= delay_s <= limit_s
    assert backoff_s(failures + 1, first_s, limit_s) in (2 * delay_s, limit_s)
