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
    paused_record,
    place_request,
)
from turboserve.contracts.errors import (
    InvalidInputError,
    MigrationOverError,
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
from turboserve.state_store.core import controls, session_migrations
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.workers import Slots


def migrating(to: str = "w2") -> SessionRecord:
    record = active()
    return session_migrations.begin(record, begin_request(record, to), FREE, 3.0, 5.0).record


def test_a_migration_goes_through_migrating_and_changes_the_owner_only_at_its_commit() -> None:
    begun = migrating()
    assert (begun.phase, begun.worker, begun.target, begun.epoch) == (Phase.MIGRATING, "w1", "w2", 1)
    assert begun.migration == begun.version
    change = session_migrations.commit(
        begun, commit_request(begun, next_chunk=4, numbers={"seconds": 0.5}), 4.0
    )
    after = change.record
    assert (after.phase, after.worker, after.target, after.migration) == (Phase.ACTIVE, "w2", None, None)
    assert (after.epoch, after.own_revision, after.state_digest) == (2, None, "d1")
    assert change.decision is not None
    assert (change.decision.kind, change.decision.numbers["seconds"]) == ("migrated", 0.5)
    with pytest.raises(MigrationOverError):
        session_migrations.commit(after, commit_request(begun), 5.0)


def test_a_suspended_session_migrates_suspended_and_needs_no_slot() -> None:
    paused = paused_record(active(), 3.0)
    full = Slots("m", WorkerPhase.READY, capacity=2, used=2)
    begun = session_migrations.begin(paused, begin_request(paused), full, 4.0, 5.0).record
    assert (begun.phase, begun.activity, begun.target) == (Phase.SUSPENDED, Activity.PAUSED, "w2")
    with pytest.raises(TransitionError):
        session_migrations.begin(begun, begin_request(begun, "w3"), FREE, 5.0, 5.0)
    after = session_migrations.commit(begun, commit_request(begun), 5.0).record
    assert (after.phase, after.activity, after.worker, after.epoch) == (
        Phase.SUSPENDED,
        Activity.PAUSED,
        "w2",
        2,
    )


def test_a_suspended_session_without_state_is_released_under_the_next_epoch() -> None:
    paused = paused_record(active(), 3.0)
    begun = session_migrations.begin(paused, begin_request(paused), FREE, 4.0, 5.0).record
    assert begun.migration is not None
    change = session_migrations.abandon(begun, begun.migration, "no state", 5.0, release=True)
    assert change is not None
    after = change.record
    assert (after.phase, after.worker, after.target, after.migration) == (Phase.SUSPENDED, None, None, None)
    assert (after.epoch, after.own_revision) == (begun.epoch + 1, None)
    assert change.decision is not None
    assert (change.decision.kind, change.decision.worker) == ("release", None)
    assert session_migrations.abandon(after, begun.migration, "again", 6.0, release=True) is None


def test_a_running_session_is_never_released_by_the_end_of_a_migration() -> None:
    record = active()
    begun = session_migrations.begin(record, begin_request(record), FREE, 4.0, 5.0).record
    assert begun.migration is not None
    change = session_migrations.abandon(begun, begun.migration, "no state", 5.0, release=True)
    assert change is not None
    assert (change.record.phase, change.record.worker, change.record.epoch) == (
        Phase.ACTIVE,
        begun.worker,
        begun.epoch,
    )


@pytest.mark.parametrize("how", ["pause", "idle", "end", "fail", "place", "abandon"])
def test_whatever_ends_a_migration_makes_its_commit_too_late(how: str) -> None:
    begun = migrating()
    ended: dict[str, Callable[[], Change | None]] = {
        "pause": lambda: rules.pause(begun, 4.0),
        "idle": lambda: rules.suspend_idle(begun, SuspendIdle(session="s1", expected_version=3), 4.0),
        "end": lambda: rules.end(begun, "bye", 4.0),
        "fail": lambda: rules.fail(begun, FailSession(session="s1", epoch=1, worker="w1", reason="x"), 4.0),
        "place": lambda: rules.place(begun, place_request(begun, "w3"), FREE, 4.0, 5.0),
        "abandon": lambda: session_migrations.abandon(begun, begun.migration or 0, "x", 4.0),
    }
    over = ended[how]()
    assert over is not None
    assert (over.record.target, over.record.migration) == (None, None)
    with pytest.raises(MigrationOverError):
        session_migrations.commit(over.record, commit_request(begun), 5.0)
    assert session_migrations.abandon(over.record, begun.migration or 0, "late", 5.0) is None


def test_a_prompt_and_a_resume_do_not_end_a_migration() -> None:
    begun = migrating()
    prompt = SubmitPrompt(session="s1", prompt_id="e", prompt="x")
    prompted = controls.submit_prompt(begun, prompt, 4.0)[0].record
    assert session_migrations.commit(prompted, commit_request(begun), 5.0).record.control_seq == 1
    paused = paused_record(active(), 3.0)
    suspended = session_migrations.begin(paused, begin_request(paused), FREE, 4.0, 5.0).record
    resumed = rules.resume(suspended, 5.0)
    assert resumed is not None
    assert (
        session_migrations.commit(resumed.record, commit_request(suspended), 6.0).record.activity
        is Activity.WATCHING
    )


def test_a_state_that_the_log_has_left_behind_is_refused_by_name() -> None:
    begun = migrating().model_copy(update={"next_chunk": 5})
    with pytest.raises(StaleStateError) as caught:
        session_migrations.commit(begun, commit_request(begun, next_chunk=4), 5.0)
    assert (caught.value.field, caught.value.limit) == ("next_chunk", 5)
    # The count of the log may lag behind; the state never does.
    assert session_migrations.commit(begun, commit_request(begun, next_chunk=6), 5.0).record.worker == "w2"


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
def test_a_migration_to_a_worker_that_cannot_take_it_is_refused(
    slots: Slots, error: type[TurboServeError]
) -> None:
    record = active()
    with pytest.raises(error):
        session_migrations.begin(record, begin_request(record), slots, 3.0, 5.0)
    with pytest.raises(InvalidInputError, match="already"):
        session_migrations.begin(record, begin_request(record, "w1"), FREE, 3.0, 5.0)
    waiting = rules.create(REQUEST, 1.0).record
    with pytest.raises(TransitionError, match="requested"):
        session_migrations.begin(waiting, begin_request(waiting), FREE, 3.0, 5.0)
