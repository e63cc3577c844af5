"""Who is paid for: from a launch to an end that the store has heard."""

from __future__ import annotations

from turboserve.autoscaler.rents import Rents
from turboserve.autoscaler.slots import Slot


def slot(worker: str | None, launched_at: float = 0.0, ready_at: float | None = None) -> Slot:
    return Slot("p-0", 0, worker=worker, launched_at=launched_at, ready_at=ready_at)


def test_an_end_is_told_until_it_is_heard() -> None:
    rents = Rents("h100", 1.0)
    rents.look([slot("a", launched_at=2.0)], 5.0)
    [one] = rents.rentals(6.0)
    assert (one.worker, one.age_s, one.ready_ago_s, one.ended_ago_s) == ("a", 4.0, None, None)
    rents.look([slot("a", launched_at=2.0, ready_at=7.0)], 8.0)
    rents.acknowledged(rents.rentals(8.0))
    rents.look([slot("b", launched_at=9.0)], 10.0)
    before = rents.rentals(12.0)
    assert [(r.worker, r.age_s, r.ready_ago_s, r.ended_ago_s) for r in before] == [
        ("a", 10.0, 5.0, 2.0),
        ("b", 3.0, None, None),
    ]
    # Not heard: told again, with the same end.
    assert rents.rentals(13.0)[0].ended_ago_s == 3.0
    rents.acknowledged(before)
    assert [r.worker for r in rents.rentals(14.0)] == ["b"]
    # It is not opened again by a look at slots that no longer hold it.
    rents.look([slot("b", launched_at=9.0)], 15.0)
    assert [r.worker for r in rents.rentals(16.0)] == ["b"]


def test_a_worker_that_ended_while_an_answer_was_on_its_way_is_told_next() -> None:
    rents = Rents(None, 1.0)
    rents.look([slot("a")], 1.0)
    sent = rents.rentals(1.0)
    rents.look([slot(None)], 2.0)
    rents.acknowledged(sent)
    assert rents.rentals(3.0)[0].ended_ago_s == 1.0
