"""The rules of what a worker is paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turboserve.contracts.cost import Rental
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core.rentals import (
    BRIDGE_S,
    FORMER_KEPT,
    ClockReading,
    RentalRow,
    described,
    followed,
    reported,
    take_over,
    unmentioned,
)

PRICES = {"h100": 3.6, "*": 1.8}
WALL = 1_700_000_000.0
HOUR_S, DAYS_40_S = 3_600.0, 40 * 86_400.0


def at(seconds: float, process: str = "sto_1", step_s: float = 0.0) -> ClockReading:
    """Return a reading `seconds` after the beginning, by a store whose wall clock is off by `step_s`."""
    return ClockReading(process, 50.0 + seconds, WALL + seconds + step_s)


def rental(age_s: float, **more: object) -> Rental:
    return Rental.model_validate({"worker": "w", "member": "local-0", "age_s": age_s, **more})


def row_after(
    row: RentalRow | None, age_s: float, now: ClockReading, process: str = "asc_1", **more: object
) -> RentalRow:
    return reported(row, "local", process, rental(age_s, **more), PRICES, now)


def record(
    renewed_at: float, phase: WorkerPhase = WorkerPhase.READY, started_at: float = WALL, **more: object
) -> WorkerRecord:
    values = {"id": "w", "model": "m", "capacity": 2, "device": "cuda:0", "started_at": started_at, **more}
    return WorkerRecord.model_validate({"phase": phase, "renewed_at": renewed_at, **values})


def test_a_worker_is_paid_for_from_its_launch_and_while_it_starts() -> None:
    row = row_after(None, 4.0, at(4.0), kind="h100")
    assert (row.started_at, row.paid_s, row.gpu_seconds, row.price_hour) == (WALL, 4.0, 4.0, 3.6)
    row = row_after(row, 14.0, at(14.0), kind="h100", ready_ago_s=3.0)
    assert (row.paid_s, row.starting_s) == (14.0, 11.0)
    row = row_after(row, 20.0, at(20.0), kind="h100", ready_ago_s=9.0, ended_ago_s=1.0)
    assert (row.paid_s, row.starting_s, row.ended_at) == (19.0, 11.0, WALL + 19.0)
    assert row.estimated_s == 0.0


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, DAYS_40_S, -DAYS_40_S])
def test_a_step_of_the_wall_clock_costs_nothing(step_s: float) -> None:
    """Incident: an hour forward or backward added 7,200 GPU-seconds to two workers; 40 days 6.9 million."""
    row = row_after(None, 10.0, at(10.0))
    row = row_after(row, 11.0, at(11.0, step_s=step_s))
    row = row_after(row, 12.0, at(12.0))
    assert (row.paid_s, row.estimated_s) == (12.0, 0.0)
    row = row_after(row, 13.0, at(13.0, step_s=step_s), ended_ago_s=0.5)
    assert (row.paid_s, row.estimated_s) == (12.5, 0.0)


def test_reports_that_come_twice_or_late_change_nothing() -> None:
    row = row_after(None, 10.0, at(10.0))
    late = row_after(row, 4.0, at(11.0))
    assert (late.paid_s, late.seen_at, late.meter_s) == (row.paid_s, row.seen_at, row.meter_s)
    ended = row_after(row, 12.0, at(12.0), ended_ago_s=1.0)
    assert row_after(ended, 14.0, at(14.0), ended_ago_s=3.0).paid_s == ended.paid_s == 11.0
    # A report from before its end does not reopen it.
    assert row_after(ended, 10.0, at(14.0)).ended_at == ended.ended_at


def test_what_lies_between_two_autoscalers_is_measured_by_the_store() -> None:
    row = row_after(None, 100.0, at(100.0))
    # The next one found it at 110, and reports at 112; the wall clock has stepped meanwhile.
    row = row_after(row, 2.0, at(112.0, step_s=DAYS_40_S), "asc_2")
    assert (row.paid_s, row.estimated_s) == (112.0, 0.0)
    assert row_after(row, 3.0, at(113.0), "asc_2").paid_s == 113.0


def test_where_the_store_was_replaced_as_well_wall_clocks_bridge_a_bounded_time() -> None:
    row = row_after(None, 100.0, at(100.0))
    row = row_after(row, 2.0, at(112.0, "sto_2"), "asc_2")
    assert (row.paid_s, row.estimated_s) == (112.0, 10.0)
    row = row_after(row, 2.0, at(130.0, "sto_3", step_s=DAYS_40_S), "asc_3")
    assert (row.paid_s, row.estimated_s) == (114.0 + BRIDGE_S, 10.0 + BRIDGE_S)
    # A backward step leaves nothing to bridge, and the measured time counts.
    row = row_after(row, 3.0, at(140.0, "sto_4", step_s=-DAYS_40_S), "asc_4")
    assert (row.paid_s, row.estimated_s) == (117.0 + BRIDGE_S, 10.0 + BRIDGE_S)


def test_an_autoscaler_that_went_on_while_the_store_was_replaced_has_measured_it_all() -> None:
    row = row_after(None, 100.0, at(100.0))
    row = row_after(row, 700.0, at(700.0, "sto_2", step_s=-DAYS_40_S))
    assert (row.paid_s, row.estimated_s) == (700.0, 0.0)


def test_a_time_that_two_processes_report_is_paid_once() -> None:
    """The store knows up to which time it has counted, whoever reported that."""
    row = row_after(None, 100.0, at(100.0))
    assert row_after(row, 60.0, at(105.0), "asc_2").paid_s == 105.0


def test_what_was_paid_before_a_pool_reported_the_worker_is_not_paid_again() -> None:
    """Also if another process of the store had followed it."""
    row = followed(None, record(WALL + 1), PRICES, at(2.0))
    row = followed(row, record(WALL + 4), PRICES, at(4.0))
    assert row is not None
    assert row.paid_s == 4.0
    assert row_after(row, 10.0, at(10.0)).paid_s == 10.0
    assert row_after(row, 10.0, at(10.0, "sto_2")).paid_s == 10.0
    # No step can take away what was paid.
    assert row_after(row, 10.0, at(10.0, "sto_2", step_s=-DAYS_40_S)).paid_s == 10.0


def test_what_a_late_first_look_has_counted_is_not_paid_again() -> None:
    """The worker renewed at 1; the first look came at 5, and counted up to 5."""
    row = followed(None, record(WALL + 1, started_at=WALL + 1), PRICES, at(5.0))
    assert row is not None
    assert row.paid_s == 4.0
    assert row_after(row, 10.0, at(10.0, "sto_2")).paid_s == 10.0


def test_the_time_from_launch_to_start_is_paid_also_where_the_worker_was_seen_first() -> None:
    """Incident: the store that had followed the worker left out the three seconds before its start."""
    row = followed(None, record(WALL + 3, started_at=WALL + 3), PRICES, at(5.0))
    assert row is not None
    assert row.paid_s == 2.0
    row = row_after(row, 8.0, at(8.0))
    assert (row.paid_s, row.estimated_s) == (8.0, 2.0)
    assert row_after(row, 9.0, at(9.0)).paid_s == 9.0


def test_a_process_that_was_replaced_is_not_believed_again() -> None:
    assert take_over(None, (), "a") == ("a", ())
    assert take_over("a", (), "a") == ("a", ())
    assert take_over("a", (), "b") == ("b", ("a",))
    assert take_over("b", ("a",), "a") is None
    many = tuple(str(number) for number in range(FORMER_KEPT))
    assert take_over("b", many, "c") == ("c", (*many[1:], "b"))


def test_a_price_stays_that_of_its_launch() -> None:
    row = row_after(None, 0.0, at(0.0), kind="h100")
    row = reported(row, "local", "asc_1", rental(5.0, kind="h100"), {"h100": 99.0}, at(5.0))
    assert row.price_hour == 3.6


def test_an_unknown_kind_is_what_the_worker_says() -> None:
    prices = {"cuda": 2.0, "*": 1.0}
    row = reported(None, "local", "asc_1", rental(0.0), prices, at(0.0))
    assert (row.kind, row.price_hour, row.ready) == ("unknown", 1.0, False)
    after = described(row, record(WALL + 1), prices)
    assert (after.kind, after.price_hour, after.ready, after.paid_s) == ("cuda", 2.0, True, 0.0)


def test_a_pool_that_was_away_pays_no_further_than_its_last_report() -> None:
    """A night between two runs of the whole stack costs nothing."""
    row = row_after(None, 10.0, at(10.0))
    ended = unmentioned(row)
    assert (ended.ended_at, ended.paid_s) == (WALL + 10.0, 10.0)
    assert unmentioned(ended) == ended
    # The worker's row, declared gone hours later, changes nothing.
    late = record(WALL, WorkerPhase.GONE)
    assert described(ended, late, PRICES).paid_s == 10.0


def test_a_worker_without_a_pool_is_paid_for_from_renewal_to_renewal() -> None:
    assert followed(None, record(WALL, WorkerPhase.GONE), PRICES, at(0.0)) is None
    # If a pool started the worker, the pool's reports are more precise.
    assert followed(None, record(WALL, pool_member="local-0"), PRICES, at(0.0)) is None
    row = followed(None, record(WALL + 9), PRICES, at(10.0))
    assert row is not None
    assert (row.pool, row.paid_s, row.estimated_s, row.kind) == (None, 10.0, 10.0, "cuda")
    row = followed(row, record(WALL + 11), PRICES, at(12.0))
    assert row is not None
    assert (row.paid_s, row.estimated_s) == (12.0, 10.0)
    # It is silent: nothing is paid until it renews, and then all of it.
    silent = followed(row, record(WALL + 11), PRICES, at(40.0))
    assert silent == row
    again = followed(silent, record(WALL + 39), PRICES, at(40.0))
    assert again is not None
    assert (again.paid_s, again.estimated_s) == (40.0, 10.0)
    gone = followed(row, record(WALL + 11, WorkerPhase.GONE), PRICES, at(60.0))
    assert gone is not None
    assert (gone.paid_s, gone.ended_at) == (12.0, WALL + 60.0)
    assert followed(gone, record(WALL + 70), PRICES, at(70.0)) == gone


@pytest.mark.parametrize("step_s", [DAYS_40_S, -DAYS_40_S])
def test_a_step_costs_nothing_for_a_worker_of_no_pool_either(step_s: float) -> None:
    row = followed(None, record(WALL), PRICES, at(0.0))
    row = followed(row, record(WALL + step_s + 2), PRICES, at(2.0, step_s=step_s))
    row = followed(row, record(WALL + 4), PRICES, at(4.0))
    assert row is not None
    assert (row.paid_s, row.estimated_s) == (4.0, 0.0)
    # Seen by another process of the store: bounded and marked.
    row = followed(row, record(WALL + step_s + 6), PRICES, at(6.0, "sto_2", step_s=step_s))
    assert row is not None
    assert row.paid_s == 4.0 + row.estimated_s
    assert row.estimated_s == (BRIDGE_S if step_s > 0 else 0.0)


def test_a_clock_that_was_wrong_when_the_worker_began_counts_for_little() -> None:
    row = followed(None, record(WALL, started_at=0.0), PRICES, at(1.0))
    assert row is not None
    assert row.paid_s == row.estimated_s == BRIDGE_S


def test_a_worker_that_was_declared_gone_and_lives_is_still_paid_for() -> None:
    row = replace(row_after(None, 0.0, at(0.0)), ended_at=WALL)
    row = row_after(row, 9.0, at(9.0))
    assert (row.ended_at, row.paid_s) == (None, 9.0)


def test_a_row_gone_does_not_end_what_its_pool_still_pays_for() -> None:
    row = row_after(None, 0.0, at(0.0))
    assert described(row, record(WALL + 1, WorkerPhase.GONE), PRICES).ended_at is None
