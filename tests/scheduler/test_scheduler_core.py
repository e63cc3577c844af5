"""The scheduler's core, event by event."""

from __future__ import annotations

from typing import TypeVar

import pytest

from turboserve.baselines.least_loaded import LeastLoaded
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import LoadReport, SessionRefusal, WorkerPhase, WorkerRecord
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import (
    AllListed,
    Answered,
    Command,
    DeclareGone,
    Event,
    ListAll,
    ListWorkers,
    LoadReported,
    Place,
    ReadSession,
    RecordDecision,
    Refused,
    SendFeedback,
    SessionChanged,
    SuspendIdle,
    Tick,
    WorkerChanged,
    WorkersListed,
)
from turboserve.scheduler.policy import Policy

Kind = TypeVar("Kind")


def worker(
    name: str, phase: WorkerPhase = WorkerPhase.READY, capacity: int = 1, weights: str | None = None
) -> WorkerRecord:
    return WorkerRecord(
        id=name,
        model="m",
        phase=phase,
        capacity=capacity,
        weights_digest=weights,
        started_at=1,
        renewed_at=1,
    )


def session(name: str = "s", version: int = 1, **more: object) -> SessionRecord:
    fields: dict[str, object] = {
        "id": name,
        "tenant": "t",
        "model": "m",
        "prompt": "p",
        "seed": 1,
        "phase": Phase.REQUESTED,
        "version": version,
        "epoch": 0,
        "created_at": 1,
        "updated_at": 1,
    }
    return SessionRecord.model_validate({**fields, **more})


class Bench:
    """A core filled with `workers` and `sessions`, fed by hand."""

    def __init__(self, *known: WorkerRecord | SessionRecord, policy: Policy | None = None) -> None:
        self.now = 0.0
        self.core = Scheduler(LeastLoaded(), policy or Policy())
        self.out: list[Command] = []
        self.feed(Tick())
        workers = tuple(row for row in known if isinstance(row, WorkerRecord))
        sessions = tuple(row for row in known if isinstance(row, SessionRecord))
        self.feed(AllListed(self.take(ListAll).ticket, workers, sessions))

    def feed(self, event: Event, after: float = 0.0) -> None:
        self.now += after
        self.out += self.core.handle(event, self.now)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.feed(Tick(), after=0.25)

    def take(self, kind: type[Kind]) -> Kind:
        found = next(command for command in self.out if isinstance(command, kind))
        self.out.remove(found)
        return found

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [command for command in self.out if isinstance(command, kind)]

    def confirm(self, place: Place, row: SessionRecord) -> SessionRecord:
        """Let the store carry out the placement."""
        changes = {
            "phase": Phase.ACTIVE,
            "worker": place.worker,
            "epoch": row.epoch + 1,
            "version": row.version + 1,
        }
        after = row.model_copy(update=changes)
        self.feed(Answered(place.ticket, after))
        return after

    def load(
        self, name: str, phase: WorkerPhase = WorkerPhase.READY, refuses: SessionRecord | None = None
    ) -> None:
        refusals = (
            () if refuses is None else (SessionRefusal(session=refuses.id, epoch=refuses.epoch, reason="no"),)
        )
        self.feed(
            LoadReported(LoadReport(worker=name, model="m", capacity=1, phase=phase, refusals=refusals))
        )


def test_nothing_is_decided_before_the_view_is_filled() -> None:
    core = Scheduler(LeastLoaded())
    commands = core.handle(WorkerChanged(worker("a")), 0.0) + core.handle(SessionChanged(session()), 0.0)
    assert [type(command) for command in commands] == [ListAll]


def test_a_reservation_stands_while_the_outcome_is_unknown() -> None:
    """The answer was lost. The placement may have been done, so its slot is not given to another session."""
    bench = Bench(worker("a"), session("s1"))
    first = bench.take(Place)
    bench.feed(SessionChanged(session("s2")))
    bench.feed(Answered(first.ticket, refused=Refused.UNKNOWN))
    assert not bench.all(Place)
    bench.pass_time(1.0)
    read = bench.take(ReadSession)
    assert not bench.all(Place)
    # It was not done: the session that waited longest gets the slot.
    bench.feed(Answered(read.ticket, session("s1")))
    assert bench.take(Place).session == "s1"


def test_a_change_without_an_answer_is_found_by_reading() -> None:
    bench = Bench(worker("a"), session())
    place = bench.take(Place)
    bench.feed(Answered(place.ticket, refused=Refused.UNKNOWN))
    bench.pass_time(1.0)
    done = session(version=2, phase=Phase.ACTIVE, worker="a", epoch=1)
    bench.feed(Answered(bench.take(ReadSession).ticket, done))
    bench.pass_time(5.0)
    assert not bench.all(Place)


def test_a_conflict_is_read_and_decided_again() -> None:
    bench = Bench(worker("a"), session())
    bench.feed(Answered(bench.take(Place).ticket, refused=Refused.CONFLICT))
    bench.feed(Answered(bench.take(ReadSession).ticket, session(version=5)))
    assert bench.take(Place).expected_version == 5


def test_a_session_that_ended_meanwhile_is_forgotten() -> None:
    bench = Bench(worker("a"), session())
    bench.feed(Answered(bench.take(Place).ticket, refused=Refused.NOT_FOUND))
    # A late event does not bring it back.
    bench.feed(SessionChanged(session(version=2)))
    assert not bench.all(Place)
    assert bench.core.view.workers["a"].load == 0


def test_a_worker_that_is_full_after_all_rests_and_everything_is_listed() -> None:
    bench = Bench(worker("a"), worker("b"), session())
    place = bench.take(Place)
    assert place.worker == "a"
    bench.feed(Answered(place.ticket, refused=Refused.NO_CAPACITY), after=2.0)
    assert bench.take(Place).worker == "b"
    assert bench.all(ListAll)


def test_a_worker_that_is_gone_after_all_is_not_tried_again() -> None:
    bench = Bench(worker("a"), session())
    bench.feed(Answered(bench.take(Place).ticket, refused=Refused.WORKER_GONE))
    bench.load("a")
    bench.feed(WorkerChanged(worker("a")))
    bench.pass_time(3.0)
    assert not bench.all(Place)
    bench.feed(WorkerChanged(worker("b")))
    assert bench.take(Place).worker == "b"


def test_only_ready_workers_are_given_sessions() -> None:
    bench = Bench(worker("a", WorkerPhase.STARTING), worker("b", WorkerPhase.DRAINING), session())
    assert not bench.all(Place)
    assert bench.take(RecordDecision).decision.reason == "new session: no worker that serves m is ready"
    bench.load("a")
    assert bench.take(Place).worker == "a"


def test_a_worker_that_loads_its_model_may_be_silent_for_longer() -> None:
    """Loading keeps the worker busy, and no viewer waits for a session on it."""
    loading, serving = worker("a", WorkerPhase.STARTING, capacity=0), worker("b")
    bench = Bench(loading, serving, policy=Policy(worker_timeout_s=12.0, starting_timeout_s=60.0))

    def silence(seconds: float) -> set[str]:
        for _ in range(int(seconds)):
            bench.pass_time(1.0)
            for asked in bench.all(ListWorkers):
                bench.out.remove(asked)
                bench.feed(WorkersListed(asked.ticket, (loading, serving)))
        return {declared.worker for declared in bench.all(DeclareGone)}

    assert silence(30.0) == {"b"}
    assert silence(35.0) == {"a", "b"}


def test_a_worker_that_says_it_drains_stays_draining() -> None:
    """Its row may report it later, or have reported otherwise before."""
    bench = Bench(worker("a"))
    bench.load("a", WorkerPhase.DRAINING)
    bench.load("a")
    bench.feed(WorkerChanged(worker("a")))
    bench.feed(SessionChanged(session()))
    assert not bench.all(Place)


def test_a_worker_started_again_under_its_id_serves_again() -> None:
    bench = Bench(worker("a").model_copy(update={"started_at": 10.0}))
    bench.load("a", WorkerPhase.DRAINING)
    bench.feed(WorkerChanged(worker("a").model_copy(update={"started_at": 20.0})))
    # A late report of the previous process does not apply to this one.
    late = worker("a", phase=WorkerPhase.DRAINING).model_copy(update={"started_at": 10.0})
    bench.core.view.put_worker(late, 0.0)
    bench.feed(SessionChanged(session()))
    assert not bench.core.view.workers["a"].draining


def test_waiting_is_noted_once_per_reason() -> None:
    bench = Bench(session())
    bench.pass_time(3.0)
    assert [note.decision.kind for note in bench.all(RecordDecision)] == ["wait"]
    bench.feed(WorkerChanged(worker("a", capacity=0)))
    bench.pass_time(3.0)
    assert [note.decision.reason for note in bench.all(RecordDecision)] == [
        "new session: no worker that serves m is ready",
        "new session: the only worker that serves m is full",
    ]


def test_a_refusal_excludes_its_worker_for_a_while_that_grows() -> None:
    bench = Bench(worker("a"), session(), policy=Policy(refused_s=2.0, worker_timeout_s=1e6))
    row = bench.confirm(bench.take(Place), session())
    for rest_s in (2.0, 4.0):
        bench.load("a", refuses=row)
        bench.load("a", refuses=row)
        bench.pass_time(rest_s - 0.5)
        assert not bench.all(Place), "it is the only worker, and it has just refused"
        bench.pass_time(1.0)
        place = bench.take(Place)
        assert place.decision.reason == "its worker a refused it: the bottleneck load grows least"
        row = bench.confirm(place, row)
    bench.load("a", refuses=row)
    bench.feed(WorkerChanged(worker("b")))
    assert bench.take(Place).worker == "b"


def test_a_worker_that_was_started_again_refuses_what_it_had_and_another_takes_it_at_once() -> None:
    bench = Bench(worker("a"), session(), policy=Policy(worker_timeout_s=1e6))
    row = bench.confirm(bench.take(Place), session())
    bench.load("a", WorkerPhase.STARTING)
    bench.pass_time(1.0)
    assert not bench.all(Place), "until it says so, nobody knows that its sessions are gone"
    bench.load("a", WorkerPhase.STARTING, refuses=row)
    assert not bench.all(Place), "there is no other"
    bench.feed(WorkerChanged(worker("b")))
    assert bench.take(Place).worker == "b"


def test_a_row_of_an_unknown_worker_makes_it_look_again() -> None:
    bench = Bench(worker("a"))
    bench.pass_time(2.0)
    bench.feed(SessionChanged(session(phase=Phase.ACTIVE, worker="b", epoch=1)))
    assert bench.all(ListAll)
    assert not bench.all(Place), "unknown is not dead"


def test_an_owner_that_is_not_listed_is_gone() -> None:
    bench = Bench(worker("a"), session(phase=Phase.ACTIVE, worker="dead", epoch=3))
    place = bench.take(Place)
    assert (place.worker, place.decision.kind, place.decision.epoch) == ("a", "recover", 4)


def test_a_viewer_that_only_the_store_has_seen_is_a_viewer() -> None:
    """The store answers `conflict`. A retry at once would only be refused again."""
    running = session(phase=Phase.ACTIVE, worker="a", epoch=1)
    bench = Bench(worker("a"), running, policy=Policy(idle_after_s=5.0, worker_timeout_s=1e6))
    bench.pass_time(6.0)
    bench.feed(Answered(bench.take(SuspendIdle).ticket, refused=Refused.CONFLICT))
    bench.feed(Answered(bench.take(ReadSession).ticket, running))
    bench.pass_time(4.0)
    assert not bench.all(SuspendIdle)
    bench.pass_time(2.0)
    assert bench.all(SuspendIdle)


def test_the_paused_are_not_idle() -> None:
    paused = session(phase=Phase.SUSPENDED, activity=Activity.PAUSED, worker="a", epoch=1)
    bench = Bench(worker("a"), paused, policy=Policy(idle_after_s=5.0, worker_timeout_s=1e6))
    bench.pass_time(10.0)
    assert not bench.all(SuspendIdle)


def test_the_feedback_counts_reservations_and_who_waits() -> None:
    bench = Bench(worker("a", capacity=4), session("s1"), session("s2"), session("s3", model="other"))
    feedback = {report.feedback.model: report.feedback for report in bench.all(SendFeedback)}
    mine, other = feedback["m"], feedback["other"]
    assert (mine.rho_max, mine.required, mine.waiting, mine.capacity, mine.workers) == (0.5, 2, 2, 4, 1)
    assert (other.rho_max, other.required, other.waiting, other.capacity) == (0.0, 1, 1, 0)
    assert mine.own_required is other.own_required is None
    for place in bench.all(Place):
        bench.confirm(place, session(place.session))
    last = [report.feedback for report in bench.all(SendFeedback) if report.feedback.model == "m"][-1]
    assert (last.rho_max, last.required, last.waiting) == (0.5, 2, 0)


def test_unexpected_answers_change_nothing() -> None:
    bench = Bench(worker("a"), session())
    place = bench.take(Place)
    bench.feed(Answered(place.ticket + 100, refused=Refused.UNKNOWN))
    bench.feed(AllListed(place.ticket + 101, (), ()))
    assert bench.core.view.workers["a"].reserved == {"s"}
    row = bench.confirm(place, session())
    bench.feed(Answered(place.ticket, refused=Refused.UNKNOWN))
    bench.pass_time(2.0)
    assert not bench.all(ReadSession)
    assert bench.core.view.sessions["s"].record == row


def test_the_noise_of_measured_latencies_is_not_followed_and_their_drift_is() -> None:
    bench = Bench(worker("a"))

    def report(seconds: dict[int, float]) -> dict[int, float]:
        bench.feed(LoadReported(LoadReport(worker="a", model="m", capacity=2, chunk_latency_s=seconds)))
        return bench.core.view.workers["a"].chunk_latency_s

    first = {1: 0.1, 2: 0.2}
    assert report(first) == first
    assert report({1: 0.105, 2: 0.185}) == first
    assert report({}) == first
    assert report({1: 0.1, 2: 0.23}) == {1: 0.1, 2: 0.23}
    assert report({1: 0.1}) == {1: 0.1}
    for step in range(1, 40):
        true = 0.1 * 1.02**step
        assert report({1: true})[1] == pytest.approx(true, rel=0.11)


def test_a_refusal_that_is_not_repeated_is_over() -> None:
    """The only worker was restarted: it runs under the same epoch what it refused while it loaded."""
    bench = Bench(worker("a"), session(), policy=Policy(worker_timeout_s=1e6))
    row = bench.confirm(bench.take(Place), session())
    bench.load("a", WorkerPhase.STARTING, refuses=row)
    assert bench.core.waiting == 1
    # It has just begun to load again, and has not read its rows yet.
    bench.load("a", WorkerPhase.STARTING)
    assert bench.core.waiting == 1
    bench.load("a", refuses=row)
    assert bench.core.waiting == 1
    bench.load("a")
    assert bench.core.waiting == 0
    bench.pass_time(60.0)
    assert not bench.all(Place)
    # A session that it runs can be refused again.
    bench.load("a", refuses=row)
    assert bench.core.waiting == 1


def test_a_refusal_of_another_epoch_or_by_another_worker_takes_nothing_back() -> None:
    bench = Bench(worker("a"), worker("b", capacity=0), session(), policy=Policy(worker_timeout_s=1e6))
    row = bench.confirm(bench.take(Place), session())
    bench.load("a", refuses=row)
    bench.load("b")
    assert bench.core.waiting == 1
    bench.load("a", refuses=row.model_copy(update={"epoch": row.epoch - 1}))
    assert bench.core.waiting == 0
