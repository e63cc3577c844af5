"""Migrations in the scheduler's core, event by event: each step, each timeout, each unexpected event."""

from __future__ import annotations

import itertools

import pytest

from tests.scheduler.migrations_bench import Bench, migrating, session, worker
from turboserve.contracts import errors
from turboserve.contracts.sessions import Activity, Phase
from turboserve.contracts.workers import NO_STATE, MigrationReport, MigrationStage, WorkerPhase
from turboserve.scheduler.messages import (
    AbandonMigration,
    Answered,
    BeginMigration,
    CommitMigration,
    MigrationRequested,
    Place,
    ReadSession,
    Refused,
    Reply,
    SessionChanged,
    Tick,
    WorkerChanged,
)
from turboserve.scheduler.placement import MigrationKind
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.worker_view import Draining


def test_a_migration_from_proposal_to_commit() -> None:
    bench = Bench(worker("a"), worker("b"), session())
    bench.wishes.wish("s", "b")
    bench.pass_time(1.0)
    begin = bench.take(BeginMigration)
    assert (begin.expected_version, begin.worker, begin.decision.kind) == (2, "b", "migrate")
    assert begin.decision.reason == "balance: it gains"
    assert begin.decision.numbers == {"bytes": 7.0, "gain_s": 0.2, "cost_s": 0.1}
    # It counts at both ends from the decision on, and once at each.
    assert [bench.core.view.workers[name].load for name in "ab"] == [1, 1]
    bench.feed(SessionChanged(bench.do(begin)))
    assert [bench.core.view.workers[name].load for name in "ab"] == [1, 1]
    bench.feed(Answered(begin.ticket, bench.rows["s"]))
    assert [bench.core.view.workers[name].load for name in "ab"] == [1, 1]
    bench.load("b", MigrationReport(session="s", migration=3, stage=MigrationStage.COPYING))
    assert bench.none(CommitMigration, AbandonMigration)
    bench.verified(bytes_copied=100, seconds=0.5)
    commit = bench.store(CommitMigration)
    assert (commit.migration, commit.worker, commit.next_chunk, commit.digest) == (3, "b", 4, "d")
    assert commit.numbers == {"bytes_copied": 100, "seconds": 0.5}
    assert [bench.core.view.workers[name].load for name in "ab"] == [0, 1]
    assert bench.core.view.state_bytes == {"m": 100}
    bench.pass_time(2.0)
    assert bench.none(BeginMigration, CommitMigration, AbandonMigration)


def test_there_is_never_a_second_command_while_one_is_under_way() -> None:
    bench = migrating()
    bench.verified()
    commit = bench.take(CommitMigration)
    bench.verified()
    bench.pass_time(60.0)
    assert bench.none(CommitMigration, AbandonMigration, BeginMigration, Place, ReadSession)
    bench.feed(Answered(commit.ticket, bench.do(commit)))
    assert not bench.core.view.migrating


@pytest.mark.parametrize("stage", [None, MigrationStage.COPYING])
def test_a_migration_that_takes_too_long_is_given_up(stage: MigrationStage | None) -> None:
    bench = migrating()
    if stage is not None:
        bench.load("b", MigrationReport(session="s", migration=2, stage=stage))
    bench.pass_time(bench.policy.migration_timeout_s - 1)
    assert bench.none(AbandonMigration)
    bench.pass_time(2.0)
    assert "not verified within 20 s" in bench.store(AbandonMigration).reason
    assert [bench.core.view.workers[name].load for name in "ab"] == [1, 0]


def test_a_large_state_has_as_long_as_its_target_tries_and_a_margin_from_when_it_says_so() -> None:
    bench = migrating()
    bench.pass_time(15.0)
    copying = MigrationReport(session="s", migration=2, stage=MigrationStage.COPYING, limit_s=500.0)
    bench.load("b", copying)
    # Repeated reports keep their first meaning.
    for _ in range(10):
        bench.pass_time(50.0)
        bench.load("b", copying)
    bench.pass_time(bench.policy.migration_margin_s - 1)
    assert bench.none(AbandonMigration)
    bench.pass_time(2.0)
    assert "not verified within 505 s" in bench.store(AbandonMigration).reason


def test_no_target_has_longer_than_the_policy_says() -> None:
    bench = migrating()
    bench.load("b", MigrationReport(session="s", migration=2, stage=MigrationStage.COPYING, limit_s=1e9))
    bench.pass_time(bench.policy.migration_timeout_max_s)
    assert bench.none(AbandonMigration)
    bench.pass_time(bench.policy.migration_margin_s + 1)
    bench.store(AbandonMigration)


def test_a_migration_that_its_target_could_not_make_is_given_up_and_not_tried_again_at_once() -> None:
    bench = migrating()
    failed = MigrationReport(
        session="s", migration=2, stage=MigrationStage.FAILED, reason="the digest differs"
    )
    bench.load("b", failed)
    assert bench.store(AbandonMigration).reason == "the digest differs"
    bench.wishes.wish("s", "b", MigrationKind.DRAIN)
    bench.pass_time(bench.policy.migration_cooldown_s - 1)
    assert bench.none(BeginMigration)
    bench.pass_time(2.0)
    assert bench.take(BeginMigration).worker == "b"


def test_a_session_whose_migrations_fail_rests_longer_each_time_up_to_a_bound() -> None:
    """Incident: a rescue that could not succeed was tried again after a constant rest, for ever."""
    bench = Bench(worker("a"), worker("b"), session())
    bench.wishes.wish("s", "b", MigrationKind.RESCUE)
    bench.pass_time(1.0)

    def fail() -> float:
        begun = bench.store(BeginMigration)
        assert begun.decision.reason == "rescue: it gains"
        migration = bench.rows["s"].migration
        assert migration is not None
        bench.load("b", MigrationReport(session="s", migration=migration, stage=MigrationStage.FAILED))
        bench.store(AbandonMigration)
        failed_at = bench.now
        while bench.none(BeginMigration):
            bench.pass_time(1.0)
        return bench.now - failed_at

    rest_s = bench.policy.migration_cooldown_s
    rests_s = [fail() for _ in range(6)]
    assert rests_s == pytest.approx([rest_s * factor for factor in (1, 2, 4, 8, 8, 8)], abs=2.0)
    # One that succeeds ends the series.
    bench.store(BeginMigration)
    bench.verified()
    bench.store(CommitMigration)
    assert bench.core.view.sessions["s"].rests_until == pytest.approx(bench.now + rest_s, abs=0.5)
    assert bench.core.view.sessions["s"].failed_in_epoch is None


def test_reports_of_another_migration_say_nothing() -> None:
    bench = migrating()
    for migration in (1, 3):
        bench.load("b", MigrationReport(session="s", migration=migration, stage=MigrationStage.VERIFIED))
        bench.load("b", MigrationReport(session="s", migration=migration, stage=MigrationStage.FAILED))
    # Only the target may report it.
    bench.load("a", MigrationReport(session="s", migration=2, stage=MigrationStage.VERIFIED))
    assert bench.none(CommitMigration, AbandonMigration)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("refused", [Refused.UNKNOWN, Refused.CONFLICT])
def test_a_beginning_whose_outcome_is_unknown_is_settled_by_the_row(refused: Refused, done: bool) -> None:
    bench = Bench(worker("a"), worker("b", capacity=1), session())
    bench.wishes.wish("s", "b")
    bench.pass_time(1.0)
    begin = bench.take(BeginMigration)
    bench.wishes.migrations.clear()
    if done:
        bench.do(begin)
    bench.feed(Answered(begin.ticket, refused=refused))
    # The slot is kept until the row is known.
    assert bench.core.view.workers["b"].load == 1
    bench.pass_time(1.0)
    bench.feed(Answered(bench.take(ReadSession).ticket, bench.rows["s"]))
    assert bench.core.view.workers["b"].load == (1 if done else 0)
    assert bench.core.view.migrating == ({"s"} if done else set())


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("step", [CommitMigration, AbandonMigration])
def test_an_end_whose_outcome_is_unknown_is_settled_by_the_row(
    step: type[CommitMigration | AbandonMigration], done: bool
) -> None:
    bench = migrating()
    if step is CommitMigration:
        bench.verified()
    else:
        bench.load("b", MigrationReport(session="s", migration=2, stage=MigrationStage.FAILED))
    command = bench.take(step)
    if done:
        bench.do(command)
    bench.feed(Answered(command.ticket, refused=Refused.UNKNOWN))
    assert bench.none(step)
    bench.pass_time(1.0)
    bench.feed(Answered(bench.take(ReadSession).ticket, bench.rows["s"]))
    if done:
        bench.pass_time(5.0)
        assert bench.none(CommitMigration, AbandonMigration, ReadSession)
    else:
        assert bench.take(step).migration == 2


def test_a_state_that_the_log_has_left_behind_is_given_up() -> None:
    bench = migrating()
    bench.verified()
    bench.feed(Answered(bench.take(CommitMigration).ticket, refused=Refused.STALE_STATE))
    assert "later chunk" in bench.store(AbandonMigration).reason
    bench.pass_time(5.0)
    assert bench.none(CommitMigration, AbandonMigration)


def test_a_new_scheduler_finishes_what_the_old_one_began() -> None:
    bench = migrating()
    bench.restart()
    assert bench.none(CommitMigration, AbandonMigration)
    bench.verified()
    bench.store(CommitMigration)
    assert bench.rows["s"].worker == "b"


def test_a_new_scheduler_abandons_migrations_without_reports() -> None:
    bench = migrating()
    bench.pass_time(bench.policy.migration_timeout_s - 5)
    bench.restart()
    bench.pass_time(bench.policy.migration_timeout_s - 5)
    assert bench.none(AbandonMigration)
    bench.pass_time(6.0)
    bench.store(AbandonMigration)
    assert bench.rows["s"].worker == "a"


def test_a_scheduler_that_was_held_up_does_not_take_its_own_pause_for_a_slow_migration() -> None:
    bench = migrating()
    bench.feed(Tick(), after=300.0)
    assert bench.none(AbandonMigration)
    bench.verified()
    bench.take(CommitMigration)


def test_the_death_of_the_source_is_recovered_unless_the_state_is_there() -> None:
    for verified in (True, False):
        bench = migrating()
        if verified:
            report = MigrationReport(session="s", migration=2, stage=MigrationStage.VERIFIED)
            bench.core.view.workers["b"].arrivals["s"] = report
        bench.feed(WorkerChanged(worker("a", phase=WorkerPhase.GONE)))
        if verified:
            assert bench.none(Place)
            assert bench.store(CommitMigration).worker == "b"
            assert bench.none(Place)
        else:
            assert bench.none(CommitMigration)
            assert bench.take(Place).decision.kind == "recover"


def test_the_death_of_the_target_ends_the_migration() -> None:
    bench = migrating()
    bench.feed(WorkerChanged(worker("b", phase=WorkerPhase.GONE)))
    assert "b is gone" in bench.store(AbandonMigration).reason
    assert bench.none(Place)
    assert bench.core.view.workers["a"].load == 1


def test_a_migration_to_a_worker_that_is_to_be_emptied_is_given_up_before_the_copy_is_done_in_vain() -> None:
    bench = migrating()
    bench.load("b", MigrationReport(session="s", migration=2, stage=MigrationStage.COPYING))
    assert bench.none(AbandonMigration)
    bench.feed(WorkerChanged(worker("b", phase=WorkerPhase.DRAINING)))
    assert "b is draining" in bench.store(AbandonMigration).reason
    assert [bench.core.view.workers[name].load for name in "ab"] == [1, 0]


def test_a_state_that_is_there_when_its_target_comes_to_be_emptied_is_committed() -> None:
    bench = migrating()
    bench.core.view.workers["b"].process = Draining(WorkerPhase.DRAINING)
    bench.verified()
    bench.store(CommitMigration)
    assert bench.none(AbandonMigration)


def test_a_pause_during_a_migration_frees_the_slot_at_the_target() -> None:
    bench = migrating()
    paused = bench.change("s", phase=Phase.SUSPENDED, activity=Activity.PAUSED, target=None, migration=None)
    bench.feed(SessionChanged(paused))
    assert [bench.core.view.workers[name].load for name in "ab"] == [0, 0]
    bench.verified(migration=2)
    assert bench.none(CommitMigration, AbandonMigration)
    # It was paused, which is no failure of the target.
    assert not bench.core.view.sessions["s"].migration_failures


def test_a_suspended_session_migrates_without_a_slot_and_resumes_where_it_arrives() -> None:
    suspended = {"phase": Phase.SUSPENDED, "activity": Activity.PAUSED}
    bench = Bench(worker("a", phase=WorkerPhase.DRAINING), worker("b", capacity=1), session(**suspended))
    bench.wishes.wish("s", "b", MigrationKind.DRAIN)
    bench.pass_time(1.0)
    bench.store(BeginMigration)
    assert bench.core.view.workers["b"].load == 0
    # Its user is back: it waits for its state instead of starting again on another worker.
    bench.feed(SessionChanged(bench.change("s", activity=Activity.WATCHING)))
    assert bench.none(Place)
    bench.verified()
    bench.store(CommitMigration)
    place = bench.take(Place)
    assert (place.worker, place.decision.kind) == ("b", "resume")


def test_the_state_of_a_suspended_session_dies_with_its_holder() -> None:
    suspended = session(phase=Phase.SUSPENDED, activity=Activity.PAUSED, target="b", migration=2)
    bench = Bench(worker("a"), worker("b"), suspended)
    bench.feed(WorkerChanged(worker("a", phase=WorkerPhase.GONE)))
    assert "a is gone" in bench.store(AbandonMigration).reason


def test_a_suspended_session_of_which_its_worker_has_nothing_does_not_keep_a_drain_waiting() -> None:
    """Incident: it was offered to one worker after the other without end, so its worker never left."""
    suspended = {"phase": Phase.SUSPENDED, "activity": Activity.PAUSED}
    bench = Bench(worker("a", phase=WorkerPhase.DRAINING), worker("b"), worker("c"), session(**suspended))
    bench.wishes.wish("s", "b", MigrationKind.DRAIN)
    bench.pass_time(1.0)
    migration = bench.store(BeginMigration)
    record = bench.core.view.sessions["s"].record
    assert record.migration is not None
    failed = MigrationReport(
        session="s",
        migration=record.migration,
        stage=MigrationStage.FAILED,
        reason="no_state: gone",
        code=NO_STATE,
    )
    bench.load("b", failed)
    assert bench.store(AbandonMigration).release
    assert migration.session == "s"
    assert bench.core.view.sessions["s"].record.worker is None
    bench.pass_time(60.0)
    assert bench.none(BeginMigration, Place)
    # Its user comes back: it starts on another worker, from the latents that are kept.
    bench.feed(SessionChanged(bench.change("s", activity=Activity.WATCHING)))
    assert bench.take(Place).worker in ("b", "c")


def test_migrations_at_once_are_bounded_over_all_and_per_worker() -> None:
    names = [f"s{number}" for number in range(8)]
    workers = [worker(name, capacity=8) for name in "abcde"]
    policy = Policy(idle_after_s=1e9, migrations_at_once=3, migrations_per_worker=2)
    bench = Bench(*workers, *(session(name) for name in names), policy=policy)
    for name, target in zip(names, itertools.cycle("bcde"), strict=False):
        bench.wishes.wish(name, target)
    bench.pass_time(3.0)
    begun = [bench.take(BeginMigration), bench.take(BeginMigration)]
    # `a` is at one end of each migration.
    assert bench.none(BeginMigration)
    bench.feed(Answered(begun[0].ticket, bench.do(begun[0])))
    bench.pass_time(2.0)
    assert bench.none(BeginMigration)
    bench.verified(begun[0].session, begun[0].worker)
    bench.store(CommitMigration)
    bench.pass_time(1.0)
    assert bench.take(BeginMigration).session == "s2"


def test_balance_waits_for_those_who_wait_and_drains_do_not() -> None:
    waiting = session("w", None, phase=Phase.REQUESTED, epoch=0, model="n")
    leaves = worker("a", phase=WorkerPhase.DRAINING)
    bench = Bench(leaves, worker("b"), session("s1"), session("s2"), waiting)
    bench.wishes.wish("s1", "b")
    bench.wishes.wish("s2", "b", MigrationKind.DRAIN)
    bench.feed(Tick(), after=2.0)
    assert bench.take(BeginMigration).session == "s2"
    assert bench.none(BeginMigration)


def test_no_migration_is_planned_while_sessions_wait_and_no_worker_drains() -> None:
    waiting = session("w", None, phase=Phase.REQUESTED, epoch=0)
    bench = Bench(worker("a"), worker("b"), session("s"), waiting)
    bench.wishes.wish("s", "b")
    place = bench.take(Place)
    bench.pass_time(2.0)
    # A plan would take longer than the placement that is under way.
    assert bench.wishes.asked == 0
    placed = bench.change("w", phase=Phase.ACTIVE, worker=place.worker, epoch=1)
    bench.feed(Answered(place.ticket, placed))
    bench.pass_time(2.0)
    assert bench.take(BeginMigration).session == "s"


def test_without_rebalancing_only_drains_and_operators_migrate() -> None:
    policy = Policy(idle_after_s=1e9, rebalance=False)
    bench = Bench(worker("a"), worker("b"), session("s1"), session("s2"), session("s3"), policy=policy)
    bench.wishes.wish("s1", "b")
    bench.wishes.wish("s2", "b", MigrationKind.DRAIN)
    bench.pass_time(2.0)
    assert bench.take(BeginMigration).session == "s2"
    assert bench.none(BeginMigration)
    bench.feed(MigrationRequested(1, "s3", "b"))
    assert bench.take(BeginMigration).session == "s3"


def test_a_session_whose_worker_gives_nothing_away_is_not_migrated() -> None:
    mute = worker("a").model_copy(update={"transfer": ()})
    bench = Bench(mute, worker("b"), session())
    bench.wishes.wish("s", "b")
    bench.feed(Tick(), after=2.0)
    bench.feed(MigrationRequested(1, "s", "b"))
    assert isinstance(bench.take(Reply).error, errors.TransitionError)
    assert bench.none(BeginMigration)
    assert bench.wishes.asked > 0
