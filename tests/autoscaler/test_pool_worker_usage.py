"""Worker usage: from a launch to an end that the store has acknowledged."""

from __future__ import annotations

from turboserve.autoscaler.pool_members import PoolMember
from turboserve.autoscaler.store_link import WorkerUsage


def member(worker: str | None, launched_at: float = 0.0, ready_at: float | None = None) -> PoolMember:
    return PoolMember("p-0", 0, worker=worker, launched_at=launched_at, ready_at=ready_at)


def test_an_end_is_reported_until_it_is_acknowledged() -> None:
    usage = WorkerUsage("h100", 1.0)
    usage.look([member("a", launched_at=2.0)], 5.0)
    [one] = usage.rentals(6.0)
    assert (one.worker, one.age_s, one.ready_ago_s, one.ended_ago_s) == ("a", 4.0, None, None)
    usage.look([member("a", launched_at=2.0, ready_at=7.0)], 8.0)
    usage.acknowledged(usage.rentals(8.0))
    usage.look([member("b", launched_at=9.0)], 10.0)
    before = usage.rentals(12.0)
    assert [(r.worker, r.age_s, r.ready_ago_s, r.ended_ago_s) for r in before] == [
        ("a", 10.0, 5.0, 2.0),
        ("b", 3.0, None, None),
    ]
    # Not acknowledged: reported again, with the same end.
    assert usage.rentals(13.0)[0].ended_ago_s == 3.0
    usage.acknowledged(before)
    assert [r.worker for r in usage.rentals(14.0)] == ["b"]
    # A later look at members that no longer hold the worker does not reopen it.
    usage.look([member("b", launched_at=9.0)], 15.0)
    assert [r.worker for r in usage.rentals(16.0)] == ["b"]


def test_a_worker_that_ended_during_a_request_is_reported_next() -> None:
    usage = WorkerUsage(None, 1.0)
    usage.look([member("a")], 1.0)
    sent = usage.rentals(1.0)
    usage.look([member(None)], 2.0)
    usage.acknowledged(sent)
    assert usage.rentals(3.0)[0].ended_ago_s == 1.0
