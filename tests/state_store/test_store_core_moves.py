"""The rules of migrations: from one owner to the next, and everything that ends a migration."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.state_store.core_requests import (
    FREE,
    REQUEST,
    active,
    begin_request,
    commit_request,
    place_request,
)
from turboserve.contracts.errors import (
    InvalidInputError,
    MoveOverError,
    NoCapacityError,
    StaleStateError,
    TransitionError,
    TurboServeError,
    WorkerGoneError,
)
from turboserve.contracts.requests import (
    FailSession,
    SubmitPrompt,
    SuspendIdle,
)
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.state_store.core import moves
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.workers import Slots


def moving(to: str = "w2") -> SessionRecord:
    record = active()
    return moves.begin(record, begin_request(record, to), FREE, 3.0, 5.0).record


def test_a_move_goes_through_migrating_and_changes_the_owner_only_at_its_commit() -> None:
    begun = moving()
    assert (begun.phase, begun.worker, begun.target, begun.epoch) == (Phase.MIGRATING, "w1", "w2", 1)
    assert begun.move == begun.version
    change = moves.commit(begun, commit_request(begun, next_chunk=4, numbers={"seconds": 0.5}), 4.0)
    after = change.record
    assert (after.phase, after.worker, after.target, after.move) == (Phase.ACTIVE, "w2", None, None)
    assert (after.epoch, after.own_revision, after.state_digest) == (2, None, "d1")
    assert change.decision is not None
    assert (change.decision.kind, change.decision.numbers["seconds"]) == ("moved", 0.5)
    with pytest.raises(MoveOverError):
        moves.commit(after, commit_request(begun), 5.0)


def test_a_suspended_session_moves_asleep_and_needs_no_slot() -> None:
    paused = rules.pause(active(), 3.0).record
    full = Slots("m", WorkerPhase.READY, capacity=2, used=2)
    begun = moves.begin(paused, begin_request(paused), full, 4.0, 5.0).record
    assert (begun.phase, begun.activity, begun.target) == (Phase.SUSPENDED, Activity.PAUSED, "w2")
    with pytest.raises(TransitionError):
        moves.begin(begun, begin_request(begun, "w3"), FREE, 5.0, 5.0)
    after = moves.commit(begun, commit_request(begun), 5.0).record
    assert (after.phase, after.activity, after.worker, after.epoch) == (
        Phase.SUSPENDED,
        Activity.PAUSED,
        "w2",
        2,
    )


def test_a_suspended_session_without_state_is_released_under_the_next_epoch() -> None:
    paused = rules.pause(active(), 3.0).record
    begun = moves.begin(paused, begin_request(paused), FREE, 4.0, 5.0).record
    assert begun.move is not None
    change = moves.abandon(begun, begun.move, "no state", 5.0, release=True)
    assert change is not None
    after = change.record
    assert (after.phase, after.worker, after.target, after.move) == (Phase.SUSPENDED, None, None, None)
    assert (after.epoch, after.own_revision) == (begun.epoch + 1, None)
    assert change.decision is not None
    assert (change.decision.kind, change.decision.worker) == ("release", None)
    assert moves.abandon(after, begun.move, "again", 6.0, release=True) is None


def test_a_running_session_is_never_released_by_the_end_of_a_move() -> None:
    record = active()
    begun = moves.begin(record, begin_request(record), FREE, 4.0, 5.0).record
    assert begun.move is not None
    change = moves.abandon(begun, begun.move, "no state", 5.0, release=True)
    assert change is not None
    assert (change.record.phase, change.record.worker, change.record.epoch) == (
        Phase.ACTIVE,
        begun.worker,
        begun.epoch,
    )


@pytest.mark.parametrize("how", ["pause", "idle", "end", "fail", "place", "abandon"])
def test_whatever_ends_a_move_makes_its_commit_too_late(how: str) -> None:
    begun = moving()
    ended: dict[str, Callable[[], Change | None]] = {
        "pause": lambda: rules.pause(begun, 4.0),
        "idle": lambda: rules.suspend_idle(begun, SuspendIdle(session="s1", expected_version=3), 4.0),
        "end": lambda: rules.end(begun, "bye", 4.0),
        "fail": lambda: rules.fail(begun, FailSession(session="s1", epoch=1, worker="w1", reason="x"), 4.0),
        "place": lambda: rules.place(begun, place_request(begun, "w3"), FREE, 4.0, 5.0),
        "abandon": lambda: moves.abandon(begun, begun.move or 0, "x", 4.0),
    }
    over = ended[how]()
    assert over is not None
    assert (over.record.target, over.record.move) == (None, None)
    with pytest.raises(MoveOverError):
        moves.commit(over.record, commit_request(begun), 5.0)
    assert moves.abandon(over.record, begun.move or 0, "late", 5.0) is None


def test_a_prompt_and_a_resume_do_not_end_a_move() -> None:
    begun = moving()
    prompt = SubmitPrompt(session="s1", event_id="e", prompt="x")
    prompted = rules.submit_prompt(begun, prompt, 4.0)[0].record
    assert moves.commit(prompted, commit_request(begun), 5.0).record.control_seq == 1
    paused = rules.pause(active(), 3.0).record
    asleep = moves.begin(paused, begin_request(paused), FREE, 4.0, 5.0).record
    resumed = rules.resume(asleep, 5.0)
    assert resumed is not None
    assert moves.commit(resumed.record, commit_request(asleep), 6.0).record.activity is Activity.WATCHING


def test_a_state_that_the_log_has_left_behind_is_refused_by_name() -> None:
    begun = moving().model_copy(update={"next_chunk": 5})
    with pytest.raises(StaleStateError) as caught:
        moves.commit(begun, commit_request(begun, next_chunk=4), 5.0)
    assert (caught.value.field, caught.value.limit) == ("next_chunk", "5")
    # The count of the log may lag behind; the state never does.
    assert moves.commit(begun, commit_request(begun, next_chunk=6), 5.0).record.worker == "w2"


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        (Slots("m", WorkerPhase.GONE, 2, 0), WorkerGoneError),
        (Slots("m", WorkerPhase.DRAINING, 2, 0), NoCapacityError),
        (Slots("m", WorkerPhase.STARTING, 2, 0), NoCapacityError),
        (Slots("m", WorkerPhase.READY, 2, 2), NoCapacityError),
        (Slots("other", WorkerPhase.READY, 2, 0), InvalidInputError),
    ],
)
def test_a_move_to_a_worker_that_cannot_take_it_is_refused(
    slots: Slots, error: type[TurboServeError]
) -> None:
    record = active()
    with pytest.raises(error):
        moves.begin(record, begin_request(record), slots, 3.0, 5.0)
    with pytest.raises(InvalidInputError, match="already"):
        moves.begin(record, begin_request(record, "w1"), FREE, 3.0, 5.0)
    waiting = rules.create(REQUEST, 1.0).record
    with pytest.raises(TransitionError, match="requested"):
        moves.begin(waiting, begin_request(waiting), FREE, 3.0, 5.0)
