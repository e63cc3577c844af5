"""The weights that made a session's chunks: stored in its row, compared at every change of owner."""

from __future__ import annotations

import pytest

from tests.helpers.waiting import eventually
from tests.state_store.core_requests import REQUEST, begin_request, paused_record, place_request
from tests.state_store.state_store_harness import Harness
from turboserve import subjects
from turboserve.contracts.errors import ConflictError, InvalidInputError, TransitionError
from turboserve.contracts.events import SessionPlaced
from turboserve.contracts.requests import ListWorkers, PlaceSession, ReleaseSession
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.weights import FindWeights, WeightKey
from turboserve.contracts.workers import HeldSession, WorkerPhase
from turboserve.state_store.core import session_migrations
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.workers import Slots

SERVERS = ("real", "memory")


def slots(weights: str | None) -> Slots:
    return Slots("m", WorkerPhase.READY, capacity=2, used=0, weights_digest=weights)


def place(record: SessionRecord, weights: str | None, *, other_weights: bool = False) -> Change:
    request = place_request(record, "w2").model_copy(update={"other_weights": other_weights})
    return rules.place(record, request, slots(weights), 2.0, 5.0)


def owned(weights: str | None, chunks: int = 0) -> SessionRecord:
    record = rules.place(
        rules.create(REQUEST, 1.0).record,
        place_request(rules.create(REQUEST, 1.0).record, "w1"),
        slots(weights),
        1.0,
        5.0,
    ).record
    assert record.weights_digest == weights
    return record.model_copy(update={"next_chunk": chunks})


def previous_of(change: Change) -> str | None:
    [event] = change.events
    assert isinstance(event, SessionPlaced)
    return event.previous_weights


def test_a_session_with_chunks_goes_to_other_weights_only_if_the_request_allows_it() -> None:
    record = owned("old", chunks=3)
    same = place(record, "old")
    assert (same.record.weights_digest, previous_of(same)) == ("old", None)
    with pytest.raises(InvalidInputError) as caught:
        place(record, "new")
    assert (caught.value.field, caught.value.limit, caught.value.retryable) == (
        "weights_digest",
        "new",
        False,
    )
    other = place(record, "new", other_weights=True)
    assert (other.record.weights_digest, previous_of(other)) == ("new", "old")


def test_one_without_chunks_goes_anywhere() -> None:
    change = place(owned("old"), "new")
    assert (change.record.weights_digest, previous_of(change)) == ("new", None)


def test_a_session_that_lost_its_worker_before_its_first_chunk_still_waits_since_its_request() -> None:
    waiting = owned("old")
    assert waiting.requested_at is not None
    assert place(waiting, "old").record.requested_at == waiting.requested_at
    # Chunks have answered the request.
    assert place(owned("old", chunks=3), "old").record.requested_at is None


@pytest.mark.parametrize(("before", "worker", "after"), [(None, "new", "new"), ("old", None, "old")])
def test_what_is_not_known_is_compared_with_nothing(
    before: str | None, worker: str | None, after: str | None
) -> None:
    change = place(owned(before, chunks=3), worker)
    assert (change.record.weights_digest, previous_of(change)) == (after, None)


def test_no_state_migrates_to_other_weights() -> None:
    record = owned("old")
    with pytest.raises(InvalidInputError, match="weights"):
        session_migrations.begin(record, begin_request(record), slots("new"), 3.0, 5.0)
    begun = session_migrations.begin(record, begin_request(record), slots("old"), 3.0, 5.0).record
    assert begun.weights_digest == "old"


async def test_the_weights_are_in_the_rows_of_the_worker_and_of_its_sessions(api: Harness) -> None:
    loading = await api.worker("weights", phase=WorkerPhase.STARTING)
    old, new = [await api.worker("weights", weights_digest=digest) for digest in ("old", "new")]
    workers = {row.id: row for row in (await api.bus.call(subjects.LIST_WORKERS, ListWorkers())).workers}
    assert [workers[name].weights_digest for name in (loading, old, new)] == [None, "old", "new"]

    created = await api.create("weights")
    assert created.weights_digest is None
    placed = await api.place(created, old)
    assert (await api.get(placed.id)).weights_digest == "old"
    await api.chunk(placed, 0)

    async def counted() -> bool:
        return (await api.get(placed.id)).next_chunk == 1

    await eventually(counted)
    with pytest.raises(InvalidInputError, match="new"):
        await api.begin_migration(placed, new)
    with pytest.raises(InvalidInputError, match="new"):
        await api.place(placed, new)
    assert (await api.get(placed.id)).version == placed.version

    decision = Decision(session=placed.id, epoch=1, kind="recover", reason="its worker is gone")
    request = PlaceSession(
        session=placed.id,
        expected_version=placed.version,
        worker=new,
        decision=decision,
        other_weights=True,
    )
    after = await api.bus.call(subjects.PLACE_SESSION, request)
    assert (after.worker, after.weights_digest) == (new, "new")
    assert (await api.renew(new, "weights", weights_digest="new")).assigned[0].weights_digest == "new"


def release_request(record: SessionRecord, version: int | None = None) -> ReleaseSession:
    decision = Decision(session=record.id, epoch=record.epoch, kind="release", reason="its worker drains")
    expected = record.version if version is None else version
    return ReleaseSession(session=record.id, expected_version=expected, decision=decision)


def test_a_suspended_session_is_released_under_the_next_epoch_and_keeps_its_weights() -> None:
    suspended = paused_record(owned("old", chunks=3), 3.0)
    change = rules.release(suspended, release_request(suspended), 4.0)
    assert change is not None
    after = change.record
    assert (after.phase, after.activity, after.worker) == (suspended.phase, suspended.activity, None)
    assert (after.epoch, after.own_revision, after.weights_digest) == (suspended.epoch + 1, None, "old")
    assert change.decision is not None
    assert (change.decision.kind, change.decision.worker, change.decision.epoch) == ("release", None, 2)
    assert [event.type for event in change.events] == ["session.suspended"]
    assert rules.release(after, release_request(after), 5.0) is None
    with pytest.raises(ConflictError):
        rules.release(suspended, release_request(suspended, suspended.version - 1), 5.0)


def test_a_release_ends_the_migration_that_was_under_way_and_needs_a_suspended_session() -> None:
    running = owned("old")
    with pytest.raises(TransitionError):
        rules.release(running, release_request(running), 4.0)
    suspended = paused_record(running, 3.0)
    migrating = session_migrations.begin(suspended, begin_request(suspended), slots("old"), 3.0, 5.0).record
    change = rules.release(migrating, release_request(migrating), 4.0)
    assert change is not None
    assert (change.record.target, change.record.migration) == (None, None)


async def test_a_worker_lets_go_of_what_was_released_and_another_takes_it(api: Harness) -> None:
    old, new = [await api.worker("released", weights_digest=digest) for digest in ("old", "new")]
    placed = await api.place(await api.create("released"), old)
    suspended = await api.pause(placed.id)
    held = (HeldSession(session=placed.id, epoch=1, next_chunk=0, resident=False),)
    assert [row.id for row in (await api.renew(old, "released", held=held)).assigned] == [placed.id]
    for _ in range(2):
        released = await api.bus.call(subjects.RELEASE_SESSION, release_request(suspended))
        assert (released.worker, released.epoch) == (None, 2)
    assert (await api.renew(old, "released", held=held)).assigned == ()
    resumed = await api.resume(placed.id)
    assert (await api.place(resumed, new, kind="resume")).weights_digest == "new"
    await api.until_events(
        placed.id,
        "session.created",
        "session.placed",
        "session.suspended",
        "session.suspended",
        "session.resume_requested",
        "session.placed",
    )


async def test_a_starting_worker_learns_who_serves_its_model_and_they_learn_its_key(api: Harness) -> None:
    loading = await api.worker("peers", phase=WorkerPhase.STARTING)
    ready, draining = [
        await api.worker("peers", phase=phase, transfer=("tcp://127.0.0.1:4711",), host="near")
        for phase in (WorkerPhase.READY, WorkerPhase.DRAINING)
    ]
    other = await api.worker("other", transfer=("tcp://127.0.0.1:4711",))
    closed = await api.worker("peers")
    keys: dict[str, WeightKey] = {}

    async def granted(message: WeightKey, _: bytes) -> None:
        keys[message.worker] = message

    await api.bus.subscribe(subjects.WEIGHTS, "*", granted)
    request = FindWeights(worker=loading, model="peers")
    first, second = [await api.bus.call(subjects.FIND_WEIGHTS, request) for _ in range(2)]
    assert [(one.worker, one.addresses, one.host) for one in first.holders] == [
        (ready, ("tcp://127.0.0.1:4711",), "near")
    ]
    assert not {loading, draining, other, closed} & {one.worker for one in first.holders}
    assert first.key != second.key
    assert first.grant != second.grant

    async def told() -> bool:
        return ready in keys and keys[ready].grant == second.grant

    await eventually(told)
    assert keys == {ready: WeightKey(worker=ready, receiver=loading, grant=second.grant, key=second.key)}
    assert second.key.get_secret_value() not in repr(second)
    assert not (await api.bus.call(subjects.FIND_WEIGHTS, FindWeights(worker=loading, model="none"))).holders
