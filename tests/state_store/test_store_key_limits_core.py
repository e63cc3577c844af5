"""The rules of a key's limits, without servers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.contracts.errors import InvalidInputError, KeyQuotaError
from turboserve.contracts.keys import ChangeKey, KeyLimits, KeyRecord
from turboserve.state_store.core import key_limits
from turboserve.state_store.core.key_limits import DAY_S, KeyRates, KeyUsage

NOON = 20_000 * DAY_S + 43_200.0


def refused(check: object, *arguments: object) -> KeyQuotaError:
    with pytest.raises(KeyQuotaError) as caught:
        check(*arguments)  # type: ignore[operator]
    return caught.value


def test_a_key_without_limits_is_never_refused() -> None:
    use = KeyUsage(live=10**6, slots=10**6, gpu_seconds=1e12)
    key_limits.check_sessions(use, 1.0)
    key_limits.check_slot(use, 1.0, NOON)
    assert key_limits.create(KeyRates("k"), use.limits, NOON) == KeyRates("k")
    assert (
        key_limits.budget_left(use, NOON) == key_limits.creations_left(KeyRates("k"), use.limits, NOON) == ()
    )


def test_a_limit_refuses_what_would_exceed_it() -> None:
    limits = KeyLimits(sessions=3, slots=2)
    key_limits.check_sessions(KeyUsage(limits, live=2), 1.0)
    error = refused(key_limits.check_sessions, KeyUsage(limits, live=3), 1.0)
    assert (error.field, error.limit, error.status) == ("key_sessions", 3, 429)
    key_limits.check_slot(KeyUsage(limits, slots=1), 1.0, NOON)
    error = refused(key_limits.check_slot, KeyUsage(limits, slots=2), 1.0, NOON)
    assert (error.field, error.limit, error.retry_after_s) == ("key_slots", 2, 1.0)


def test_a_spent_budget_names_when_it_begins_anew() -> None:
    limits = KeyLimits(gpu_seconds_per_day=100.0)
    key_limits.check_slot(KeyUsage(limits, gpu_seconds=99.9), 1.0, NOON)
    error = refused(key_limits.check_slot, KeyUsage(limits, gpu_seconds=100.0), 1.0, NOON)
    assert (error.field, error.limit, error.retry_after_s) == ("key_gpu_seconds_per_day", 100.0, 43_200.0)
    assert "2024-10-05T00:00:00Z" in error.detail
    [left] = key_limits.budget_left(KeyUsage(limits, gpu_seconds=30.0), NOON)
    assert (left.limit, left.left, left.window_s, left.reset_s) == (100.0, 70.0, DAY_S, 43_200.0)


@given(st.floats(0, 4e9), st.integers(1, 120))
def test_what_is_left_of_a_rate_may_be_taken_and_no_more(now: float, per_minute: int) -> None:
    limits, rates = KeyLimits(creations_per_minute=per_minute), KeyRates("k")
    for taken in range(per_minute):
        rates = key_limits.create(rates, limits, now)
        [left] = key_limits.creations_left(rates, limits, now)
        assert left.left == per_minute - taken - 1
    error = refused(key_limits.create, rates, limits, now)
    assert error.field == left.name == "key_creations_per_minute"
    assert 0 < (error.retry_after_s or 0.0) <= 60.0 / per_minute + 1e-3
    # After the time that the error names, there is one more.
    key_limits.create(rates, limits, now + (error.retry_after_s or 0.0) + 1e-3)


def test_a_change_sets_what_it_names() -> None:
    before = KeyRecord(
        id="k", tenant="t", scopes=("admin",), created_at=1.0, limits=KeyLimits(slots=4, sessions=9)
    )
    request = ChangeKey(key="k", changes=("slots", "weight"), limits=KeyLimits(weight=2.0))
    after = key_limits.changed(before, request)
    assert after.limits == KeyLimits(sessions=9, weight=2.0)
    assert key_limits.changed(after, request) == after
    with pytest.raises(InvalidInputError) as caught:
        key_limits.changed(before, ChangeKey(key="k", changes=("tenant",)))
    assert caught.value.field == "limits.tenant"
