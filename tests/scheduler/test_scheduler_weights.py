"""A session continues with the weights that made its chunks, and with others only if it must."""

from __future__ import annotations

import pytest

from tests.scheduler.test_scheduler_core import Bench, session, worker
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.scheduler.messages import (
    Answered,
    MigrationRequested,
    Place,
    RecordDecision,
    Release,
    Reply,
    SessionChanged,
    Tick,
    WorkerChanged,
)
from turboserve.scheduler.policy import Policy

WAIT_S = Policy().weights_wait_s


def resumed(name: str = "s", digest: str | None = "old", **more: object) -> SessionRecord:
    """Return a session with chunks whose user is back."""
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
    assert "weights old is full" in bench.take(RecordDecision).decision.reason
    bench.pass_time(WAIT_S - 1.0)
    assert not bench.all(Place)
    bench.pass_time(1.5)
    place = bench.take(Place)
    assert (place.worker, place.other_weights) == ("b", True)
    assert "no worker has its weights old" in place.decision.reason


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


def test_unknown_weights_are_compared_with_nothing() -> None:
    """Rows and workers of an earlier version have unknown weights."""
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


def test_an_operator_cannot_migrate_a_state_to_other_weights() -> None:
    rows = [worker(name, capacity=2, weights=weights) for name, weights in (("a", "old"), ("b", "new"))]
    rows = [row.model_copy(update={"transfer": ("tcp://x",)}) for row in rows]
    running = session("s", phase=Phase.ACTIVE, worker="a", epoch=1, weights_digest="old")
    bench = Bench(*rows, running)
    bench.feed(MigrationRequested(1, "s", "b"))
    error = bench.take(Reply).error
    assert isinstance(error, InvalidInputError)
    assert (error.field, error.limit) == ("worker", "new")
    bench.feed(MigrationRequested(2, "s"))
    error = bench.take(Reply).error
    assert error is not None
    assert "no worker with the weights old" in error.detail or "weights old is full" in error.detail


# Workers to be emptied whose weights no other worker has


def drained(name: str = "a", capacity: int = 4) -> WorkerRecord:
    return worker(name, WorkerPhase.DRAINING, capacity, weights="old")


def running(name: str, **more: object) -> SessionRecord:
    fields: dict[str, object] = {"phase": Phase.ACTIVE, "worker": "a", "epoch": 1, "weights_digest": "old"}
    return session(name, 3, **{**fields, **more})


def test_running_sessions_are_placed_anew_as_far_as_there_is_room() -> None:
    rows = [running(f"s{n}") for n in range(3)]
    bench = Bench(drained(), worker("b", capacity=2, weights="new"), *rows)
    bench.feed(Tick(), after=0.25)
    places = bench.all(Place)
    assert [(place.session, place.worker, place.other_weights) for place in places] == [
        ("s0", "b", True),
        ("s1", "b", True),
    ]
    assert places[0].decision.kind == "rebuild"
    assert "its worker a is draining" in places[0].decision.reason
    after = bench.confirm(bench.take(Place), rows[0])
    bench.confirm(bench.take(Place), rows[1])
    # The third continues where it is: no session waits for a slot, so the pool does not grow for it.
    bench.pass_time(5.0)
    assert not bench.all(Place)
    assert bench.core.waiting == 0
    ended = after.model_copy(update={"phase": Phase.TERMINATED, "version": 9, "worker": None})
    bench.feed(SessionChanged(ended))
    bench.pass_time(1.0)
    assert [place.session for place in bench.all(Place)] == ["s2"]


def test_a_worker_with_its_weights_takes_them_by_migration_and_nothing_is_rebuilt() -> None:
    """Also while that worker is full: its sessions end, or the pool grows."""
    rows = [running("s0"), session("t", phase=Phase.ACTIVE, worker="c", epoch=1, weights_digest="old")]
    bench = Bench(drained(), worker("b", capacity=4, weights="new"), worker("c", weights="old"), *rows)
    bench.pass_time(20.0)
    assert not bench.all(Place)
    assert not bench.all(Release)


@pytest.mark.parametrize("weights", [None, "old"])
def test_where_no_other_worker_is_ready_it_stays(weights: str | None) -> None:
    bench = Bench(drained(), worker("b", WorkerPhase.STARTING, weights=weights), running("s0"))
    bench.pass_time(20.0)
    assert not bench.all(Place)


def test_suspended_sessions_are_released_a_few_at_a_time() -> None:
    suspended = [running(f"p{n}", phase=Phase.SUSPENDED, activity=Activity.PAUSED) for n in range(5)]
    bench = Bench(drained(), worker("b", capacity=1, weights="new"), *suspended)
    rows = {row.id: row for row in suspended}
    released = []
    for _ in range(5):
        bench.feed(Tick(), after=0.25)
        found = bench.all(Release)
        assert len(found) <= Policy().migrations_per_worker
        for release in found:
            bench.out.remove(release)
            assert (release.expected_version, release.decision.kind) == (3, "release")
            released.append(release.session)
            after = rows[release.session].model_copy(update={"worker": None, "version": 4, "epoch": 2})
            bench.feed(Answered(release.ticket, after))
    assert released == sorted(rows)


def test_what_is_wanted_again_is_placed_and_not_released() -> None:
    bench = Bench(drained(), worker("b", weights="new"), resumed(worker="a"))
    bench.feed(Tick(), after=0.25)
    assert bench.take(Place).worker == "b"
    assert not bench.all(Release)


def test_one_that_is_on_its_way_is_left_alone() -> None:
    migrating = running("s0", phase=Phase.MIGRATING, target="c", migration=3)
    bench = Bench(drained(), worker("b", weights="new"), worker("c", weights="new"), migrating)
    bench.feed(Tick(), after=0.25)
    assert not bench.all(Place)


def test_a_state_that_went_with_the_process_before_is_released_on_a_drain() -> None:
    """The worker was restarted under its id with other weights, which another worker has too."""
    suspended = running("p", phase=Phase.SUSPENDED, activity=Activity.PAUSED, weights_digest="older")
    bench = Bench(drained(), worker("c", weights="old"), suspended)
    bench.feed(Tick(), after=0.25)
    assert [release.session for release in bench.all(Release)] == ["p"]
