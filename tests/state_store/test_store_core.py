"""The rules of the rows, without any server: any requests in any order keep the row consistent."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    ConflictError,
    InvalidInputError,
    NoCapacityError,
    StaleEpochError,
    TransitionError,
    TurboServeError,
    UnknownModelError,
    WorkerGoneError,
)
from turboserve.contracts.events import PromptApplied, PromptSuperseded
from turboserve.contracts.requests import (
    FailSession,
    SubmitPrompt,
    SuspendIdle,
)
from turboserve.contracts.sessions import TRANSITIONS, Activity, Phase, PromptReceipt
from turboserve.contracts.workers import LoadReport, WorkerPhase
from turboserve.state_store.core import controls, session_migrations, workers
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.receipts import SettledControl
from turboserve.state_store.core.workers import ModelCapacity, Slots


class AnyOrder(RuleBasedStateMachine):
    """Every rule, in any order, against a row. Refusals must be typed and change nothing."""

    @initialize()
    def create(self) -> None:
        self.now = 1.0
        self.record = rules.create(REQUEST, self.now).record
        self.ids: set[str] = set()
        self.owners: dict[int, str | None] = {0: None}

    def apply(self, change: Change | None) -> None:
        if change is None:
            return
        before, after = self.record, change.record
        assert after.version == before.version + 1
        assert after.updated_at == self.now
        assert after.phase in TRANSITIONS[before.phase] or (
            after.phase is before.phase and not before.phase.ended
        )
        assert after.epoch in (before.epoch, before.epoch + 1)
        if after.epoch == before.epoch:
            assert (after.worker, after.own_revision) == (before.worker, before.own_revision)
            assert after.migration in (None, before.migration, after.version)
        else:
            assert after.own_revision is None
            self.owners[after.epoch] = after.worker
        [event] = change.events
        assert event.record == after
        assert event.id not in self.ids
        self.ids.add(event.id)
        self.record = after

    def attempt(self, make: object) -> None:
        self.now += 1.0
        try:
            change = make()  # type: ignore[operator]
        except (TransitionError, ConflictError, InvalidInputError):
            return
        self.apply(change)

    @rule(to=st.sampled_from(["w1", "w2"]), stale=st.booleans())
    def begin_migration(self, to: str, stale: bool) -> None:
        request = begin_request(self.record, to, self.record.version - stale)
        self.attempt(lambda: session_migrations.begin(self.record, request, FREE, self.now, 5.0))

    @rule(to=st.sampled_from(["w1", "w2"]), late=st.booleans(), behind=st.booleans())
    def commit_migration(self, to: str, late: bool, behind: bool) -> None:
        before = self.record
        request = commit_request(
            before,
            target=to,
            migration=(before.migration or 1) - late,
            next_chunk=max(0, before.next_chunk - behind),
        )
        self.attempt(lambda: session_migrations.commit(self.record, request, self.now))
        if self.record.epoch != before.epoch:
            # Never without a migration under way, never to another worker than its target, never with an
            # outdated state.
            assert (before.migration, before.target) == (request.migration, self.record.worker)
            assert before.next_chunk <= request.next_chunk
            assert self.record.state_digest == "d1"

    @rule(late=st.booleans())
    def abandon_migration(self, late: bool) -> None:
        before = self.record
        migration = (before.migration or 1) - late
        self.attempt(lambda: session_migrations.abandon(self.record, migration, "too slow", self.now))
        if self.record is not before:
            assert (self.record.worker, self.record.epoch) == (before.worker, before.epoch)

    @rule()
    def chunk_counted(self) -> None:
        if not self.record.phase.ended:
            self.record = self.record.model_copy(update={"next_chunk": self.record.next_chunk + 1})

    @rule(worker=st.sampled_from(["w1", "w2"]), stale=st.booleans())
    def place(self, worker: str, stale: bool) -> None:
        request = place_request(self.record, worker, self.record.version - stale)
        self.attempt(lambda: rules.place(self.record, request, FREE, self.now, 5.0))

    @rule()
    def pause(self) -> None:
        self.attempt(lambda: rules.pause(self.record, self.now))

    @rule()
    def resume(self) -> None:
        self.attempt(lambda: rules.resume(self.record, self.now))

    @rule(stale=st.booleans())
    def idle(self, stale: bool) -> None:
        request = SuspendIdle(session="s1", expected_version=self.record.version - stale)
        self.attempt(lambda: rules.suspend_idle(self.record, request, self.now))

    @rule(text=st.text(min_size=1, max_size=20).filter(lambda text: "\x00" not in text))
    def prompt(self, text: str) -> None:
        request = SubmitPrompt(session="s1", prompt_id="e1", prompt=text)
        self.attempt(lambda: controls.submit_prompt(self.record, request, self.now)[0])

    @rule()
    def fence_written(self) -> None:
        if self.record.epoch:
            self.record = self.record.model_copy(update={"own_revision": self.record.epoch * 10})

    @precondition(lambda self: self.record.version > 12)
    @rule()
    def end(self) -> None:
        self.attempt(lambda: rules.end(self.record, "done", self.now))

    @precondition(lambda self: self.record.version > 12)
    @rule(stale=st.booleans())
    def fail(self, stale: bool) -> None:
        worker = self.record.worker or "w1"
        epoch = max(0, self.record.epoch - stale)
        request = FailSession(session="s1", epoch=epoch, worker=worker, reason="oom")
        self.attempt(lambda: rules.fail(self.record, request, self.now))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "record"):
            return
        record = self.record
        assert record.worker == self.owners[record.epoch]
        assert sorted(self.owners) == list(range(record.epoch + 1))
        if record.phase.holds_slot:
            assert record.worker is not None
            assert record.activity is Activity.WATCHING
        if record.phase.ended:
            assert record.worker is None
        assert (record.target is None) == (record.migration is None)
        if record.phase is Phase.MIGRATING:
            assert record.target not in (None, record.worker)
        elif record.phase is not Phase.SUSPENDED:
            assert record.target is None


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_an_ended_session_allows_nothing_and_says_which_phase_it_is_in() -> None:
    ended = rules.end(active(), "bye", 3.0)
    assert ended is not None
    record = ended.record
    for wish in (
        lambda: rules.pause(record, 4.0),
        lambda: rules.resume(record, 4.0),
        lambda: rules.place(record, place_request(record), FREE, 4.0, 5.0),
        lambda: controls.submit_prompt(record, SubmitPrompt(session="s1", prompt_id="e", prompt="x"), 4.0),
    ):
        with pytest.raises(TransitionError, match="terminated") as caught:
            wish()
        assert (caught.value.field, caught.value.limit) == ("phase", "terminated")
    assert rules.end(record, "again", 4.0) is None


def test_pausing_a_paused_session_and_resuming_a_running_one_change_nothing() -> None:
    paused = paused_record(active(), 3.0)
    assert rules.pause(paused, 4.0) is None
    assert rules.resume(active(), 4.0) is None
    requested = rules.create(REQUEST, 2.0).record
    assert rules.resume(requested, 4.0) is None
    idle = rules.suspend_idle(active(), SuspendIdle(session="s1", expected_version=active().version), 3.0)
    assert idle is not None
    changed = rules.pause(idle.record, 4.0)
    assert changed is not None
    assert changed.record.activity is Activity.PAUSED


def test_the_newest_prompt_of_a_chunk_is_applied_and_supersedes_the_others() -> None:
    record = active().model_copy(update={"event_sequence": 4})
    receipts = [
        PromptReceipt(session="s1", prompt_id=f"p{n}", control_seq=n, prompt=f"prompt {n}", accepted_at=1.0)
        for n in (1, 2, 3)
    ]
    alone = controls.settle(record, [SettledControl(receipts[0])], 7, 3.0)
    assert [event.type for event in alone.events] == ["prompt.applied"]
    settled = [SettledControl(receipt, "p3") for receipt in receipts[:2]] + [SettledControl(receipts[2])]
    change = controls.settle(record, settled, 7, 3.0)
    *lost, won = change.events
    assert isinstance(won, PromptApplied)
    assert (won.prompt_id, won.chunk_index) == ("p3", 7)
    for event, receipt in zip(lost, receipts[:2], strict=True):
        assert isinstance(event, PromptSuperseded)
        assert (event.prompt_id, event.prompt, event.superseded_by) == (
            receipt.prompt_id,
            receipt.prompt,
            "p3",
        )
    assert [event.record.event_sequence for event in change.events] == [5, 6, 7]
    assert (change.record.event_sequence, change.record.version) == (7, record.version)
    assert len({event.id for event in change.events}) == 3


def test_a_paused_session_is_not_placed_until_it_is_resumed() -> None:
    paused = paused_record(active(), 3.0)
    with pytest.raises(TransitionError):
        rules.place(paused, place_request(paused), FREE, 4.0, 5.0)
    resumed = rules.resume(paused, 4.0)
    assert resumed is not None
    assert resumed.record.phase is Phase.SUSPENDED
    again = rules.place(resumed.record, place_request(resumed.record, "w2"), FREE, 5.0, 5.0)
    assert (again.record.phase, again.record.epoch, again.record.worker) == (Phase.ACTIVE, 2, "w2")


def test_a_resume_that_is_asked_for_twice_is_asked_for_once() -> None:
    resumed = rules.resume(paused_record(active(), 3.0), 4.0)
    assert resumed is not None
    assert rules.resume(resumed.record, 5.0) is None


def test_only_the_owner_fails_a_session_and_only_under_its_epoch() -> None:
    record = active()
    for epoch, worker in ((record.epoch - 1, "w1"), (record.epoch, "w2")):
        with pytest.raises(StaleEpochError):
            rules.fail(record, FailSession(session="s1", epoch=epoch, worker=worker, reason="x"), 3.0)
    request = FailSession(session="s1", epoch=record.epoch, worker="w1", reason="x\x00" * 5_000)
    failed = rules.fail(record, request, 3.0)
    assert failed is not None
    assert failed.record.phase is Phase.FAILED
    assert failed.record.reason is not None
    assert len(failed.record.reason) <= rules.REASON_LIMIT
    assert rules.fail(failed.record, request, 4.0) is None


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        (Slots("m", WorkerPhase.GONE, 2, 0), WorkerGoneError),
        (Slots("m", WorkerPhase.DRAINING, 2, 0), NoCapacityError),
        (Slots("m", WorkerPhase.STARTING, 2, 0), NoCapacityError),
        (Slots("m", WorkerPhase.READY, 2, 2), NoCapacityError),
        (Slots("m", WorkerPhase.READY, 1, 3), NoCapacityError),
        (Slots("other", WorkerPhase.READY, 2, 0), InvalidInputError),
    ],
)
def test_what_a_worker_cannot_take_is_refused(slots: Slots, error: type[TurboServeError]) -> None:
    record = rules.create(REQUEST, 1.0).record
    with pytest.raises(error):
        rules.place(record, place_request(record), slots, 2.0, 5.0)


def test_room_says_what_is_missing_and_when_to_come_back() -> None:
    with pytest.raises(UnknownModelError):
        ModelCapacity("m", known=False, capacity=0, demand=0).admit(5.0)
    with pytest.raises(NoCapacityError) as caught:
        ModelCapacity("m", known=True, capacity=2, demand=2).admit(5.0)
    assert (caught.value.limit, caught.value.retry_after_s) == (2, 5.0)
    ModelCapacity("m", known=True, capacity=2, demand=1).admit(5.0)


def test_text_that_postgres_cannot_store_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError) as caught:
        rules.create(REQUEST.model_copy(update={"prompt": "a\x00b"}), 1.0)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidInputError) as caught:
        rules.create(REQUEST.model_copy(update={"metadata": {"k\x00": "v"}}), 1.0)
    assert caught.value.field == "metadata"


def test_a_drain_is_kept_and_a_gone_worker_stays_gone() -> None:
    load = LoadReport(worker="w", model="m", capacity=2)
    joined = workers.renewed(None, load, 1.0)
    assert joined.phase is WorkerPhase.READY
    drained = workers.draining(joined)
    assert drained is not None
    assert workers.renewed(drained, load, 2.0).phase is WorkerPhase.DRAINING
    assert workers.draining(drained) is None
    left = workers.left(drained, "released")
    assert left is not None
    assert workers.left(left, "again") is None
    with pytest.raises(WorkerGoneError):
        workers.renewed(left, load, 3.0)
    with pytest.raises(WorkerGoneError):
        workers.draining(left)


def test_a_process_that_is_started_again_under_its_id_takes_the_row_over() -> None:
    starting = LoadReport(worker="w", model="m", capacity=0, phase=WorkerPhase.STARTING, started_at=10.0)
    ready = starting.model_copy(update={"phase": WorkerPhase.READY, "capacity": 2})
    row = workers.renewed(workers.renewed(None, starting, 11.0), ready, 12.0)
    # Its own first report, late, does not undo it.
    assert workers.renewed(row, starting, 13.0).phase is WorkerPhase.READY
    again, ready_again = (load.model_copy(update={"started_at": 20.0}) for load in (starting, ready))
    row = workers.renewed(row, again, 21.0)
    assert (row.phase, row.capacity, row.started_at) == (WorkerPhase.STARTING, 0, 20.0)
    for late in (ready, starting):
        with pytest.raises(WorkerGoneError, match="restarted since"):
            workers.renewed(row, late, 22.0)
    row = workers.renewed(row, ready_again, 23.0)
    assert (row.phase, row.capacity) == (WorkerPhase.READY, 2)
    assert workers.renewed(row, again, 24.0).phase is WorkerPhase.READY
    # If the start time is unknown, incarnations cannot be distinguished.
    assert not workers.of_earlier_incarnation(row, ready.model_copy(update={"started_at": 0.0}))


def test_a_drain_ends_with_the_process_that_drained() -> None:
    """Incident: a final report was lost, and the process that restarted under its id never got a session."""
    load = LoadReport(worker="w", model="m", capacity=2, started_at=10.0)
    row = workers.draining(workers.renewed(None, load, 11.0))
    assert row is not None
    assert workers.renewed(row, load, 12.0).phase is WorkerPhase.DRAINING
    again = load.model_copy(update={"started_at": 20.0})
    assert workers.renewed(row, again, 21.0).phase is WorkerPhase.READY


def test_a_worker_that_says_it_drains_is_draining() -> None:
    load = LoadReport(worker="w", model="m", capacity=2)
    joined = workers.renewed(None, load, 1.0)
    leaving = load.model_copy(update={"phase": WorkerPhase.DRAINING})
    draining = workers.renewed(joined, leaving, 2.0)
    assert workers.renewed(draining, load, 3.0).phase is WorkerPhase.DRAINING
