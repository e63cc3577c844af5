"""Which worker may be declared gone for its silence: only one whose lease has surely ended."""

from __future__ import annotations

import pytest

from turboserve.contracts.errors import ConflictError
from turboserve.contracts.workers import LoadReport, WorkerRecord
from turboserve.state_store.core import workers
from turboserve.state_store.core.workers import Leases

LEASE_S, TIMEOUT_S = 8.0, 12.0
LIMIT_S = 10.0


def row(renewed_at: float = 100.0) -> WorkerRecord:
    return workers.renewed(None, LoadReport(worker="w", model="m", capacity=2), renewed_at)


def leases() -> Leases:
    held = Leases(LEASE_S, TIMEOUT_S, now=0.0)
    held.connected(0, 0.0)
    return held


def test_a_worker_that_is_silent_for_long_is_dead() -> None:
    held = leases()
    held.renewed("w", 20.0)
    held.check_silent(row(), 100.0, 20.0 + LIMIT_S)


def test_a_worker_that_has_renewed_since_its_row_was_read_lives() -> None:
    """The scheduler read its row, the worker renewed, and the scheduler's decision arrived last.

    Found by `simulate`, seeds 50373 and 50513.
    """
    with pytest.raises(ConflictError) as refused:
        leases().check_silent(row(renewed_at=101.0), 100.0, 50.0)
    assert refused.value.field == "renewed_at"


def test_a_worker_that_renewed_a_moment_ago_may_hold_a_lease() -> None:
    """Its row does not show that: the database was down, or a crash reverted the renewal."""
    held = leases()
    held.renewed("w", 20.0)
    with pytest.raises(ConflictError) as refused:
        held.check_silent(row(), 100.0, 20.0 + LEASE_S)
    assert refused.value.retry_after_s == LIMIT_S - LEASE_S


@pytest.mark.parametrize("connection", [1, None])
def test_silence_while_the_store_was_away_ends_no_worker(connection: int | None) -> None:
    """While the store was disconnected, workers learned that no store renews, and continued."""
    held = leases()
    held.connected(connection, 50.0)
    held.connected(1, 50.5)
    with pytest.raises(ConflictError):
        held.check_silent(row(), 100.0, 50.0 + LEASE_S)
    held.connected(1, 51.0)
    held.check_silent(row(), 100.0, 50.5 + LIMIT_S)


def test_a_store_that_has_just_started_takes_no_worker_for_dead() -> None:
    with pytest.raises(ConflictError):
        Leases(LEASE_S, TIMEOUT_S, now=0.0).check_silent(row(), 100.0, LEASE_S)
