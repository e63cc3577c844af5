"""The session table, rule by rule: slots, host memory, leases, and the end of sessions."""

from __future__ import annotations

from tests.worker.table_bench import LEASE_S, Bench, row
from turboserve.contracts.sessions import Activity, Phase
from turboserve.worker.service import commands, events


def test_pause_and_resume_keep_the_state() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.handle(events.Assigned(row(version=3, phase=Phase.SUSPENDED, activity=Activity.PAUSED)))
    bench.last(commands.Suspend)
    # A chunk under way is still made and published: the epoch has not changed.
    bench.package("s1", run, 0)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
    bench.handle(events.MovedToHost("s1", run, 1))
    assert bench.table.slots_used == 0
    held = bench.table.held(lambda chunk: 0.75 * chunk)
    assert [(one.session, one.resident, one.next_chunk) for one in held] == [("s1", False, 1)]

    bench.handle(
        events.Assigned(row(version=5, epoch=2, own_revision=22, prompt="a blue square", control_seq=1))
    )
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 1, True))
    assert bench.last(commands.Resume).run == run
    assert bench.last(commands.SetConditions).prompt == "a blue square"
    bench.none(commands.Admit)
    bench.package("s1", run, 1)
    assert bench.last(commands.PublishChunk).ownership == (2, 22)


def test_a_suspension_that_the_host_has_no_room_for_parks_the_session_and_is_reported() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.handle(events.Assigned(row(version=3, phase=Phase.SUSPENDED)))
    bench.handle(events.SuspendFailed("s1", run, "host pool: full"))
    bench.last(commands.PauseGeneration)
    assert bench.table.capacity == 1
    assert [refusal.reason for refusal in bench.table.refusals()] == ["host pool: full"]
    bench.handle(events.Tick(), bench.now + 6)
    bench.last(commands.Suspend)
    bench.handle(events.MovedToHost("s1", run, 0))
    assert bench.table.capacity == 2
    assert bench.table.refusals() == ()
    bench.handle(events.Assigned(row(version=4, epoch=2, own_revision=22)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    bench.last(commands.Resume)
    bench.last(commands.ResumeGeneration)


def test_a_full_host_lets_go_of_the_state_that_slept_longest() -> None:
    """Incident: viewers who never came back filled the host for ever, and then slab after slab."""
    bench = Bench(capacity=3)
    runs = {}
    for session in ("s1", "s2", "s3"):
        runs[session] = bench.run_from(row(session)).run
        bench.handle(events.Assigned(row(session, version=3, phase=Phase.SUSPENDED)))
        if session != "s3":
            bench.handle(events.MovedToHost(session, runs[session], 0))
    bench.handle(events.SuspendFailed("s3", runs["s3"], "host pool: full"))
    assert (bench.last(commands.Evict).session, bench.last(commands.Suspend).session) == ("s1", "s3")
    assert bench.table.refusals() == ()
    bench.handle(events.MovedToHost("s3", runs["s3"], 0))
    assert {held.session for held in bench.table.held(lambda index: 0.0)} == {"s2", "s3"}
    bench.handle(events.Assigned(row("s1", version=4, epoch=2, own_revision=22)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 4, True))
    assert bench.last(commands.FetchLatents).next_chunk == 4


def test_a_session_beyond_the_slots_is_refused_and_runs_once_there_is_room() -> None:
    bench = Bench(capacity=1)
    bench.run_from(row("s1"))
    bench.handle(events.Assigned(row("s2")))
    bench.handle(events.LogEndRead("s2", bench.last(commands.ReadLogEnd).query, 0, False))
    bench.none(commands.Admit)
    assert [refusal.session for refusal in bench.table.refusals()] == ["s2"]
    bench.handle(events.Assigned(row("s1", version=3, phase=Phase.TERMINATED, worker=None)))
    assert bench.last(commands.Admit).session == "s2"
    assert bench.table.refusals() == ()


def test_a_session_waits_without_a_refusal_for_a_slot_that_is_being_freed() -> None:
    bench = Bench(capacity=1)
    run = bench.run_from(row("s1")).run
    bench.handle(events.Assigned(row("s1", version=3, phase=Phase.SUSPENDED)))
    bench.handle(events.Assigned(row("s2")))
    bench.handle(events.LogEndRead("s2", bench.last(commands.ReadLogEnd).query, 0, False))
    bench.none(commands.Admit)
    assert bench.table.refusals() == ()
    bench.handle(events.MovedToHost("s1", run, 0))
    assert bench.last(commands.Admit).session == "s2"


def test_an_answer_that_is_older_than_an_assignment_does_not_undo_it() -> None:
    bench = Bench()
    bench.handle(events.Tick(), 100)
    bench.handle(events.Assigned(row()), 101)
    bench.renew(asked_at=100.5)
    assert "s1" in bench.table.entries
    bench.renew(asked_at=102)
    assert bench.table.entries == {}


def test_an_old_row_does_not_bring_an_ended_session_back() -> None:
    bench = Bench()
    bench.run_from(row(version=2))
    bench.handle(events.Assigned(row(version=5, phase=Phase.TERMINATED, worker=None, epoch=2)))
    bench.last(commands.Evict)
    bench.renew(row(version=4))
    assert bench.table.entries == {}


def test_a_new_prompt_reaches_the_engine_once() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.handle(events.Assigned(row(version=4, prompt="a blue square", control_seq=2)))
    assert bench.last(commands.SetConditions) == commands.SetConditions("s1", run, 2, "a blue square")
    bench.renew(row(version=4, prompt="a blue square", control_seq=2))
    bench.none(commands.SetConditions)
    bench.handle(events.Assigned(row(version=3, prompt="a green circle", control_seq=1)))
    bench.none(commands.SetConditions)


def test_the_lease_counts_from_the_question_and_its_end_stops_generation() -> None:
    bench = Bench()
    bench.handle(events.Tick())
    bench.none(commands.GenerateUntil)
    asked_at = bench.now - 1.0
    bench.renew(row(), asked_at=asked_at)
    assert bench.last(commands.GenerateUntil).until == asked_at + LEASE_S
    bench.handle(events.Tick(), asked_at + LEASE_S - 0.1)
    bench.none(commands.StopGenerating)
    bench.none(commands.GenerateUntil)
    bench.handle(events.Tick(), asked_at + LEASE_S)
    bench.last(commands.StopGenerating)
    bench.renew(row(), asked_at=bench.now)
    assert bench.last(commands.GenerateUntil).until == bench.now + LEASE_S


def test_while_renewals_are_unavailable_the_lease_continues() -> None:
    """Without a store that renews, no store gives the worker's sessions away either."""
    bench = Bench()
    bench.renew(row(), asked_at=bench.now)
    for _ in range(3):
        bench.handle(events.RenewalUnavailable(bench.now + 1.0), bench.now + LEASE_S - 1.0)
        bench.none(commands.StopGenerating)
    assert bench.last(commands.GenerateUntil).until > bench.now


def test_a_lease_that_is_over_comes_back_only_with_a_renewal() -> None:
    """Incident: a worker was cut off and declared gone, and then found the state store down.

    It continued sessions that were others' (`simulate`, seed 50587).
    """
    bench = Bench()
    bench.handle(events.RenewalUnavailable(bench.now))
    bench.none(commands.GenerateUntil)
    bench.renew(row(), asked_at=bench.now)
    bench.last(commands.GenerateUntil)
    bench.handle(events.Tick(), bench.now + LEASE_S)
    bench.last(commands.StopGenerating)
    bench.handle(events.RenewalUnavailable(bench.now))
    bench.none(commands.GenerateUntil)
    bench.renew(row(), asked_at=bench.now)
    bench.last(commands.GenerateUntil)


def test_a_failed_run_is_reported_until_the_row_has_ended() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.handle(events.RunFailed("s1", run, "no such word"))
    assert bench.last(commands.FailSession) == commands.FailSession("s1", 1, "no such word")
    assert bench.table.slots_used == 0
    bench.renew(row())
    bench.last(commands.FailSession)
    bench.none(commands.Admit)
    bench.handle(events.Assigned(row(version=3, epoch=2, phase=Phase.FAILED, worker=None)))
    bench.renew()
    assert bench.said == []


def test_a_finished_session_ends_after_its_last_chunk() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    publish = bench.last(commands.PublishChunk)
    bench.handle(events.RunFinished("s1", run, "frames: no more"))
    bench.none(commands.FailSession)
    bench.outcome(publish, events.PublishOutcome.ACKED)
    assert bench.last(commands.FailSession).reason == "frames: no more"


def test_a_session_of_another_model_is_refused() -> None:
    bench = Bench()
    bench.handle(events.Assigned(row(model="other")))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    bench.none(commands.Admit)
    assert "serves toyworld, not other" in bench.table.refusals()[0].reason
