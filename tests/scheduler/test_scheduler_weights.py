"""A session goes on where the weights are that made its chunks, and on others only when it has to."""

from __future__ import annotations

import pytest
from test_scheduler_core import Bench, session, worker

from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.scheduler.messages import MoveAsked, Note, Place, Reply, SessionChanged, Tick, WorkerChanged
from turboserve.scheduler.policy import Policy

WAIT_S = Policy().weights_wait_s


def resumed(name: str = "s", digest: str | None = "old", **more: object) -> SessionRecord:
    """A session whose user is back, with chunks."""
    fields: dict[str, object] = {"phase": Phase.SUSPENDED, "activity": Activity.WATCHING, "epoch": 1}
    return session(name, 5, **{**fields, "next_chunk": 9, "weights_digest": digest, **more})


def test_a_new_session_goes_to_any_weights_of_its_model() -> None:
    bench = Bench(worker("a", weights="old"), worker("b", weights="new"), session("s1"), session("s2"))
    assert {place.worker for place in bench.all(Place)} == {"a", "b"}
    assert not any(place.other_weights for place in bench.all(Place))


@pytest.mark.parametrize("digest", ["old", "new"])
def test_one_with_chunks_goes_where_its_weights_are(digest: str) -> None:
    rows = [worker("a", capacity=4, weights="old"), worker("b", capacity=4, weights="new")]
    bench = Bench(*rows, resumed(digest=digest))
    place = bench.take(Place)
    assert (place.worker, place.other_weights) == ({"old": "a", "new": "b"}[digest], False)


def test_one_whose_worker_has_died_waits_for_a_slot_with_its_weights_and_then_no_longer() -> None:
    """Both workers with the old weights are lost to it: one is dead, one is full."""
    full = worker("a", capacity=1, weights="old")
    on_it = session("t", phase=Phase.ACTIVE, worker="a", epoch=1)
    bench = Bench(full, worker("b", capacity=4, weights="new"), on_it, resumed(worker="dead"))
    assert not bench.all(Place)
    assert "weights old are full" in bench.take(Note).decision.reason
    bench.pass_time(WAIT_S - 1.0)
    assert not bench.all(Place)
    bench.pass_time(1.5)
    place = bench.take(Place)
    assert (place.worker, place.other_weights) == ("b", True)
    assert "its weights old are nowhere to be had" in place.decision.reason


def test_a_slot_that_becomes_free_in_time_is_taken() -> None:
    on_it = session("t", phase=Phase.ACTIVE, worker="a", epoch=1)
    bench = Bench(worker("a", weights="old"), worker("b", weights="new"), on_it, resumed())
    bench.pass_time(1.0)
    ended = on_it.model_copy(update={"phase": Phase.TERMINATED, "version": 2, "worker": None})
    bench.feed(SessionChanged(ended))
    place = bench.take(Place)
    assert (place.worker, place.other_weights) == ("a", False)


@pytest.mark.parametrize("phase", [WorkerPhase.DRAINING, WorkerPhase.STARTING])
def test_where_no_worker_can_take_it_with_its_weights_it_goes_on_with_others_at_once(
    phase: WorkerPhase,
) -> None:
    bench = Bench(worker("a", phase, weights="old"), worker("b", weights="new"), resumed())
    place = bench.take(Place)
    assert (place.worker, place.other_weights) == ("b", True)


def test_weights_that_nobody_knows_are_compared_with_nothing() -> None:
    """Rows and workers of an earlier version."""
    bench = Bench(worker("a", weights="new"), resumed(digest=None))
    assert bench.take(Place).worker == "a"
    bench = Bench(worker("a", weights=None), resumed())
    assert bench.take(Place).worker == "a"


def test_its_weights_that_come_later_are_known_from_the_row() -> None:
    bench = Bench(worker("b", WorkerPhase.STARTING, weights=None), resumed())
    bench.feed(WorkerChanged(worker("b", weights="old")))
    bench.feed(Tick(), after=0.25)
    place = bench.take(Place)
    assert (place.worker, place.other_weights) == ("b", False)


def test_an_operator_cannot_move_a_state_to_other_weights() -> None:
    rows = [worker(name, capacity=2, weights=weights) for name, weights in (("a", "old"), ("b", "new"))]
    rows = [row.model_copy(update={"transfer": ("tcp://x",)}) for row in rows]
    running = session("s", phase=Phase.ACTIVE, worker="a", epoch=1, weights_digest="old")
    bench = Bench(*rows, running)
    bench.feed(MoveAsked(1, "s", "b"))
    error = bench.take(Reply).error
    assert isinstance(error, InvalidInputError)
    assert (error.field, error.limit) == ("worker", "new")
    bench.feed(MoveAsked(2, "s"))
    error = bench.take(Reply).error
    assert error is not None
    assert "no worker with the weights old" in error.detail or "weights old are full" in error.detail
