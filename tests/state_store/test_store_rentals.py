"""What a worker is paid for: rules only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.contracts.cost import Rental
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core.rentals import Row, followed, reported, unmentioned

PRICES = {"h100": 3.6, "*": 1.8}
NOW = 1_000.0


def rental(age_s: float, **more: object) -> Rental:
    return Rental.model_validate({"worker": "w", "slot": "local-0", "age_s": age_s, **more})


def record(renewed_at: float, phase: WorkerPhase = WorkerPhase.READY, **more: object) -> WorkerRecord:
    values = {"id": "w", "model": "m", "capacity": 2, "started_at": 0.0, "device": "cuda:0", **more}
    return WorkerRecord.model_validate({"phase": phase, "renewed_at": renewed_at, **values})


def test_a_worker_is_paid_for_from_its_launch_and_while_it_starts() -> None:
    row = reported(None, "local", rental(4.0, kind="h100"), PRICES, NOW)
    assert (row.started_at, row.until, row.gpu_seconds, row.price_hour) == (996.0, 1_000.0, 4.0, 3.6)
    row = reported(row, "local", rental(14.0, kind="h100", ready_ago_s=3.0), PRICES, NOW + 10)
    assert (row.ready_at, row.gpu_seconds) == (1_007.0, 14.0)
    row = reported(row, "local", rental(20.0, kind="h100", ended_ago_s=1.0), PRICES, NOW + 16)
    assert (row.ended_at, row.gpu_seconds) == (1_015.0, 19.0)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=6), st.data())
def test_reports_that_come_twice_or_late_change_nothing(ages: list[float], data: st.DataObject) -> None:
    """Each report says when it began, so however often one is told, time is paid once."""
    row: Row | None = None
    for age in sorted(ages):
        for _ in range(data.draw(st.integers(1, 3))):
            row = reported(row, "local", rental(age), PRICES, NOW + age)
    assert row is not None
    assert row.gpu_seconds == pytest.approx(max(ages))


def test_a_price_stays_that_of_its_launch() -> None:
    row = reported(None, "local", rental(0.0, kind="h100"), PRICES, NOW)
    row = reported(row, "local", rental(5.0, kind="h100"), {"h100": 99.0}, NOW + 5)
    assert row.price_hour == 3.6


def test_an_unknown_kind_is_what_the_worker_says() -> None:
    row = reported(None, "local", rental(0.0), {"cuda": 2.0, "*": 1.0}, NOW)
    assert (row.kind, row.price_hour) == ("unknown", 1.0)
    after = followed(row, record(NOW + 1), {"cuda": 2.0, "*": 1.0}, NOW + 2)
    assert after is not None
    assert (after.kind, after.price_hour, after.ready_at) == ("cuda", 2.0, NOW + 1)


def test_a_pool_that_was_away_pays_no_further_than_the_last_sign_of_life() -> None:
    """A night between two lives of the whole stack costs nothing."""
    row = reported(None, "local", rental(10.0), PRICES, NOW)
    ended = unmentioned(row)
    assert (ended.ended_at, ended.gpu_seconds) == (NOW, 10.0)
    assert unmentioned(ended) == ended
    # The worker's row, declared gone hours later, changes nothing.
    late = record(NOW, WorkerPhase.GONE)
    assert followed(ended, late, PRICES, NOW + 30_000) == ended


def test_a_worker_that_nobodys_pool_started_is_paid_for_by_its_renewals() -> None:
    assert followed(None, record(NOW, WorkerPhase.GONE), PRICES, NOW) is None
    row = followed(None, record(NOW, started_at=990.0), PRICES, NOW + 1)
    assert row is not None
    assert (row.pool, row.gpu_seconds) == (None, 10.0)
    row = followed(row, record(NOW + 5, WorkerPhase.GONE), PRICES, NOW + 40)
    assert row is not None
    assert (row.ended_at, row.gpu_seconds) == (NOW + 5, 15.0)


def test_a_worker_that_was_declared_gone_and_lives_is_still_paid_for() -> None:
    row = replace(reported(None, "local", rental(0.0), PRICES, NOW), ended_at=NOW)
    row = reported(row, "local", rental(9.0), PRICES, NOW + 9)
    assert (row.ended_at, row.gpu_seconds) == (None, 9.0)


def test_a_row_gone_does_not_end_what_its_pool_still_pays_for() -> None:
    row = reported(None, "local", rental(0.0), PRICES, NOW)
    after = followed(row, record(NOW + 1, WorkerPhase.GONE), PRICES, NOW + 3)
    assert after is not None
    assert after.ended_at is None
