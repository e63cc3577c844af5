"""The limits of one tenant, without any server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.state_store.core_requests import REQUEST
from turboserve.contracts.errors import TenantLimitError
from turboserve.state_store.core import tenants
from turboserve.state_store.core.tenants import ROW_BYTES, Tenant, TenantLimits, TenantUse
from turboserve.state_store.core.workers import ModelCapacity

RETRY_S = 5.0
ANY = Tenant("t")


def refused(action: object, *arguments: object) -> TenantLimitError:
    with pytest.raises(TenantLimitError) as caught:
        action(*arguments)  # type: ignore[operator]
    assert caught.value.retry_after_s is not None
    return caught.value


def test_without_limits_nothing_is_refused() -> None:
    none = TenantLimits()
    use = TenantUse(10**6, 10**6, 10**6, 10**6, known=True, others=True)
    tenants.check_sessions(use, none, RETRY_S)
    tenants.check_slot(use, ModelCapacity("m", True, 1, 1), none, RETRY_S)
    tenant = Tenant("t", stored_bytes=10**15)
    for _ in range(1_000):
        tenant = tenants.create(tenant, REQUEST, none, 1.0)
        tenant = tenants.submit_prompt(tenant, "x", none, 1.0)


def test_each_limit_is_reached_and_named() -> None:
    limits = TenantLimits(sessions=3, suspended=2, slots=2)
    room = ModelCapacity("m", True, 10, 5)
    tenants.check_sessions(TenantUse(live=2, suspended=1), limits, RETRY_S)
    error = refused(tenants.check_sessions, TenantUse(live=3), limits, RETRY_S)
    assert (error.field, error.limit, error.retry_after_s) == ("tenant_sessions", 3, RETRY_S)
    error = refused(tenants.check_sessions, TenantUse(live=2, suspended=2), limits, RETRY_S)
    assert (error.field, error.limit) == ("tenant_suspended", 2)
    tenants.check_slot(TenantUse(slots=1), room, limits, RETRY_S)
    error = refused(tenants.check_slot, TenantUse(slots=2), room, limits, RETRY_S)
    assert (error.field, error.limit) == ("tenant_slots", 2)


def test_stored_bytes_are_those_of_prompts_metadata_and_controls_in_utf_8() -> None:
    limits = TenantLimits(stored_bytes=ROW_BYTES + 28)
    given = {"prompt": "Würfel", "metadata": {"é": "xy"}, "controls": {"zoom": [7], "none": None}}
    request = REQUEST.model_copy(update=given)
    tenant = tenants.create(ANY, request, limits, 1.0)
    assert tenant.stored_bytes == ROW_BYTES + 7 + 2 + 2 + 7
    tenant = tenants.submit_prompt(tenant, "1234567890", limits, 1.0)
    assert tenant.stored_bytes == ROW_BYTES + 28
    error = refused(tenants.submit_prompt, tenant, "x", limits, 1.0)
    assert (error.field, error.limit) == ("tenant_stored_bytes", ROW_BYTES + 28)
    assert refused(tenants.create, tenant, request, limits, 1.0).field == "tenant_stored_bytes"


def test_rates_of_creations_and_prompts_are_counted_apart() -> None:
    limits = TenantLimits(creations_per_minute=1, prompts_per_minute=1)
    tenant = tenants.create(ANY, REQUEST, limits, 1.0)
    tenant = tenants.submit_prompt(tenant, "x", limits, 1.0)
    assert refused(tenants.create, tenant, REQUEST, limits, 2.0).field == "tenant_creations_per_minute"
    assert refused(tenants.submit_prompt, tenant, "x", limits, 2.0).field == "tenant_prompts_per_minute"
    tenant = tenants.create(tenant, REQUEST, limits, 61.0)
    tenants.submit_prompt(tenant, "x", limits, 61.0)


@given(
    st.integers(1, 30),
    st.lists(st.floats(0.0, 20.0), min_size=1, max_size=120),
    st.floats(0.0, 2e9),
)
def test_a_bucket_holds_a_minute_and_says_when_to_come_back(
    per_minute: int, pauses: list[float], start: float
) -> None:
    """In any window of w seconds at most `per_minute` · (1 + w / 60) requests pass.

    A refused client that waits for the time in its answer passes.
    """
    limits = TenantLimits(prompts_per_minute=per_minute)
    tenant, now, passed = ANY, start, []
    for pause_s in pauses:
        now += pause_s
        try:
            tenant = tenants.submit_prompt(tenant, "x", limits, now)
        except TenantLimitError as error:
            wait_s = error.retry_after_s or 0.0
        else:
            wait_s = 0.0
        if wait_s:
            assert wait_s <= 60.0 / per_minute + 1e-5
            now += wait_s
            tenant = tenants.submit_prompt(tenant, "x", limits, now)
        passed.append(now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            window_s = passed[last] - passed[first]
            assert last - first + 1 <= per_minute * (1 + window_s / 60.0) + 1e-3


def test_a_clock_that_was_set_back_keeps_no_tenant_waiting() -> None:
    limits = TenantLimits(prompts_per_minute=1)
    tenant = tenants.submit_prompt(ANY, "x", limits, 1e6)
    tenant = tenants.submit_prompt(tenant, "x", limits, 1e3)
    # The clock of another instance is behind. That gives no additional requests.
    error = refused(tenants.submit_prompt, tenant, "x", limits, 1e3 - 50.0)
    assert error.retry_after_s == pytest.approx(110.0)


@given(
    factor=st.floats(0.5, 8.0),
    capacity=st.integers(1, 60),
    wishes=st.lists(st.integers(0, 4), min_size=1, max_size=400),
)
def test_greedy_tenants_leave_a_place_for_one_more(factor: float, capacity: int, wishes: list[int]) -> None:
    """Five tenants take as much as they get.

    If a share of the places is a whole place, another tenant that has none yet always gets in.
    """
    limits = TenantLimits(slots_factor=factor)
    taken = [0] * 5
    for wish in wishes:
        room = ModelCapacity("m", True, capacity, sum(taken))
        if room.demand >= capacity:
            break
        try:
            use = TenantUse(model_slots=taken[wish], others=True)
            tenants.check_slot(use, room, limits, RETRY_S)
        except TenantLimitError:
            continue
        taken[wish] += 1
    greedy = sum(count > 0 for count in taken)
    most = max(taken)
    assert most <= factor * (capacity - most + 1) + 1
    if capacity / (1 + greedy * factor) >= 2:
        left = capacity - sum(taken)
        assert left >= 1
        tenants.check_slot(
            TenantUse(others=True), ModelCapacity("m", True, capacity, sum(taken)), limits, RETRY_S
        )


def test_a_tenant_alone_takes_everything() -> None:
    limits = TenantLimits(slots_factor=3.0)
    tenants.check_slot(TenantUse(slots=3, model_slots=3), ModelCapacity("m", True, 4, 3), limits, RETRY_S)
    use = TenantUse(slots=3, model_slots=3, others=True)
    error = refused(tenants.check_slot, use, ModelCapacity("m", True, 4, 3), limits, RETRY_S)
    assert error.field == "tenant_slots_factor"
