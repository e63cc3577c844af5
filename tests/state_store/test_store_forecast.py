"""When a refused client should come back: the forecast, and its use in admission."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.state_store.conftest import StartStore
from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.contracts.cost import Rental
from turboserve.contracts.errors import NoCapacityError
from turboserve.contracts.pool import PoolReport
from turboserve.state_store.core.forecast import (
    LONGEST_S,
    SHORTEST_S,
    WINDOW_S,
    Outlook,
    retry_after_s,
    slot_in,
    slots_free_in,
)
from turboserve.state_store.settings import Settings

SERVERS = ("real", "memory")


def outlook(
    left: int = 0, starting: tuple[float, ...] = (), coming: int = 0, start_up_s: float | None = 10.0
) -> Outlook:
    return Outlook(left, ready_slots=10, starting=starting, coming=coming, slots=5, start_up_s=start_up_s)


@given(
    st.integers(-3, 60),
    st.integers(0, 100),
    st.lists(st.integers(0, 100), max_size=6),
)
def test_the_forecast_is_the_first_second_with_enough_slots(
    needed: int, left: int, arrivals: list[int]
) -> None:
    """Counted second by second, it is neither earlier nor more than a second later."""
    given_ = outlook(left)
    found = slots_free_in(needed, given_, [float(at) for at in arrivals])

    def free(at: float) -> float:
        return left / WINDOW_S * at + 5 * sum(ready <= at for ready in arrivals)

    horizon = range(20_000)
    first = next((second for second in horizon if free(second) >= needed - 1e-9), None)
    if found is None or first is None:
        assert found is first
    else:
        assert first - 1 < found <= first + 1e-6


@given(
    st.integers(1, 50), st.integers(0, 1_000), st.lists(st.floats(0, 1e9), max_size=4), st.integers(0, 4),
    st.one_of(st.none(), st.floats(0, 1e4)),
)  # fmt: skip
def test_a_retry_time_lies_within_its_limits(
    excess: int, left: int, starting: list[float], coming: int, start_up_s: float | None
) -> None:
    given_ = outlook(left, tuple(sorted(starting)), coming, start_up_s)
    assert SHORTEST_S <= retry_after_s(excess, given_, 100.0, 5.0) <= LONGEST_S


def test_who_comes_after_more_others_waits_no_shorter() -> None:
    given_ = outlook(left=30, starting=(95.0,), coming=0)
    times = [retry_after_s(excess, given_, 100.0, 5.0) for excess in range(1, 40)]
    assert times == sorted(times)
    # One session leaves each ten seconds, and the worker of 95 is ready at 105.
    assert times[:2] == [5.0, 5.0]
    assert times[7] == pytest.approx(30.0)


def test_workers_that_admission_counts_already_free_no_slot() -> None:
    assert retry_after_s(1, outlook(starting=(95.0,), coming=0), 100.0, 7.0) == 5.0
    assert retry_after_s(1, outlook(starting=(95.0,), coming=1), 100.0, 7.0) == 7.0
    assert retry_after_s(1, outlook(starting=(95.0,), start_up_s=None), 100.0, 7.0) == 7.0


def test_the_next_slot_is_free_now_with_a_start_or_not_at_all() -> None:
    assert slot_in(9, outlook(), 100.0) == 0.0
    assert slot_in(10, outlook(starting=(96.0,), coming=2), 100.0) == 6.0
    # Five sessions wait for the starting worker; the next one waits for a worker that is not launched yet.
    assert slot_in(15, outlook(starting=(96.0,), coming=2), 100.0) == 10.0
    assert slot_in(10, outlook(), 100.0) is None


async def pool(api: Harness, name: str, maximum: int, *rentals: Rental) -> None:
    report = PoolReport(pool=name, model=name, maximum=maximum, process="asc_1", rentals=rentals)
    await api.bus.call(subjects.REPORT_POOL, report)


async def test_a_refusal_says_when_by_departures(api: Harness) -> None:
    await api.worker("leaving", capacity=3)
    sessions = await asyncio.gather(*(api.create("leaving") for _ in range(3)))
    with pytest.raises(NoCapacityError) as nothing_known:
        await api.create("leaving")
    assert nothing_known.value.retry_after_s == Settings.model_fields["admission_retry_s"].default
    for record in sessions:
        await api.end(record.id)
    for _ in range(3):
        await api.create("leaving")
    with pytest.raises(NoCapacityError) as refused:
        await api.create("leaving")
    # Three sessions have left within the window, so the next slot is expected after a third of it.
    assert refused.value.retry_after_s == pytest.approx(WINDOW_S / 3)


async def test_a_session_whose_slot_comes_too_late_is_refused(
    start_store: StartStore, settings: Settings
) -> None:
    await start_store(admission_slot_s=5.0)
    async with Harness.connected(settings) as api:
        worker = await api.worker("patient", capacity=1, pool_member="patient-0")
        await pool(api, "patient", 3, Rental(worker=worker, kind="t", age_s=60.0, ready_ago_s=20.0))
        await api.create("patient")
        with pytest.raises(NoCapacityError, match="next slot for patient is expected in 40 s") as refused:
            await api.create("patient")
        assert refused.value.retry_after_s == pytest.approx(35.0, abs=2.0)
        assert refused.value.field == "admission_slot_s"


async def test_admission_counts_coming_workers_as_far_as_decode_workers_have_time(api: Harness) -> None:
    for name, carried, room in (("undivided", None, 8), ("carried", 5, 5), ("undecoded", 0, 2)):
        await api.worker(name, capacity=2)
        report = PoolReport(pool=name, model=name, maximum=4, decode_sessions=carried)
        await api.bus.call(subjects.REPORT_POOL, report)
        records = await asyncio.gather(*(api.create(name) for _ in range(9)), return_exceptions=True)
        assert sum(not isinstance(record, BaseException) for record in records) == room
        refused = [record for record in records if isinstance(record, BaseException)]
        assert all(isinstance(error, NoCapacityError) for error in refused)


def test_workers_that_bring_no_slots_end_no_wait() -> None:
    # Two workers bring five slots each, beside the ten that are there.
    given_ = outlook(starting=(95.0, 96.0), coming=2)
    assert given_.limited(None) is given_
    assert given_.limited(16) == outlook(starting=(95.0, 96.0), coming=2)
    assert given_.limited(12) == outlook(starting=(95.0,), coming=1)
    assert given_.limited(4) == outlook(starting=(), coming=0)
    assert slot_in(10, given_.limited(4), 100.0) is None


async def test_admission_counts_the_floor_only_where_workers_absorb_at_the_maximum(api: Harness) -> None:
    for name, always, room in (("growing", False, 2), ("always", True, 4)):
        worker = await api.worker(name, capacity=2, floor_capacity=4)
        report = PoolReport(pool=name, model=name, maximum=1, absorbs=True, absorbs_at_maximum=always)
        await api.bus.call(subjects.REPORT_POOL, report)
        records = await asyncio.gather(*(api.create(name) for _ in range(6)), return_exceptions=True)
        admitted = [record for record in records if not isinstance(record, BaseException)]
        assert len(admitted) == room
        for record in admitted:
            # The store refuses a placement beyond K_floor only.
            assert (await api.place(record, worker)).worker == worker
