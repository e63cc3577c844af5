"""Migrations in the session table: the rules of both roles, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.table_bench import Bench
from tests.worker.table_migrations import FROM, A, B, expecting, migrating, row, running, sealed, verified
from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import NO_STATE, Incoming, MigrationStage
from turboserve.worker.service import commands, events, migration_commands
from turboserve.worker.service.table_migrations import ASK_S
from turboserve.worker.transfer.errors import MigrationNotOfferedError, NoStateError, SourceNotReadyError

# The source


@pytest.mark.parametrize(("migration", "target"), [(4, B), (6, B), (5, "wrk_c")])
def test_state_is_given_only_for_the_migration_that_the_row_names(migration: int, target: str) -> None:
    bench, _ = running()
    with pytest.raises(MigrationNotOfferedError):
        bench.table.offer("s1", 5, B)
    bench.handle(events.Assigned(migrating()))
    with pytest.raises(MigrationNotOfferedError):
        bench.table.offer("s1", migration, target)
    with pytest.raises(MigrationNotOfferedError):
        bench.table.offer("s2", 5, B)
    assert bench.table.offer("s1", 5, B) is False


def test_it_goes_on_generating_while_the_bulk_is_copied_and_publishes_to_the_end() -> None:
    bench, run = running()
    bench.handle(events.Assigned(migrating()))
    bench.none(commands.Quiesce, commands.PauseGeneration)
    bench.table.offer("s1", 5, B)
    bench.handle(events.QuiesceRequested("s1", 5))
    number = bench.last(commands.Quiesce).number
    bench.handle(events.ChunkPackaged("s1", run, 2, 0))
    bench.handle(events.Quiesced("s1", run, 3, number))
    bench.last(migration_commands.SendFinalDelta)
    bench.none(migration_commands.SendManifest)
    bench.handle(events.Published("s1", run, 2, (1, 10), events.PublishOutcome.ACKED))
    assert bench.last(migration_commands.SendManifest).next_chunk == 3


def test_a_target_that_hangs_up_before_the_seal_lets_it_go_on() -> None:
    bench, run = running()
    bench.handle(events.Assigned(migrating()))
    bench.table.offer("s1", 5, B)
    bench.handle(events.QuiesceRequested("s1", 5))
    bench.handle(events.Quiesced("s1", run, 2, bench.last(commands.Quiesce).number))
    bench.handle(events.TransferEnded("s1", 5))
    assert bench.last(commands.Unquiesce).run == run
    assert bench.table.offer("s1", 5, B) is False


def test_that_it_stood_still_for_an_attempt_that_is_over_means_nothing_to_the_next() -> None:
    """Incident: the late event gave away the rest of a session that had continued by then."""
    bench, run = running()
    bench.handle(events.Assigned(migrating()))
    bench.table.offer("s1", 5, B)
    bench.handle(events.QuiesceRequested("s1", 5))
    first = bench.last(commands.Quiesce).number
    bench.handle(events.TransferEnded("s1", 5))
    bench.last(commands.Unquiesce)
    bench.table.offer("s1", 5, B)
    bench.handle(events.QuiesceRequested("s1", 5))
    second = bench.last(commands.Quiesce).number
    bench.handle(events.Quiesced("s1", run, 2, first))
    bench.none(migration_commands.SendFinalDelta, migration_commands.SendManifest)
    bench.handle(events.ChunkPackaged("s1", run, 2, 0))
    bench.handle(events.Published("s1", run, 2, (1, 10), events.PublishOutcome.ACKED))
    bench.handle(events.Quiesced("s1", run, 3, second))
    assert bench.last(migration_commands.SendManifest).next_chunk == 3


def test_a_connection_that_takes_the_place_of_another_waits_for_the_same_standing_still() -> None:
    bench, run = running()
    bench.handle(events.Assigned(migrating()))
    bench.table.offer("s1", 5, B)
    bench.handle(events.QuiesceRequested("s1", 5))
    number = bench.last(commands.Quiesce).number
    bench.table.offer("s1", 5, B)
    bench.handle(events.QuiesceRequested("s1", 5))
    bench.none(commands.Quiesce)
    bench.handle(events.Quiesced("s1", run, 2, number))
    bench.last(migration_commands.SendFinalDelta)


def test_asking_whether_it_may_have_the_state_changes_nothing() -> None:
    bench, run = running()
    bench.handle(events.Assigned(migrating()))
    bench.table.offer("s1", 5, B)
    bench.handle(events.QuiesceRequested("s1", 5))
    bench.handle(events.Quiesced("s1", run, 2, bench.last(commands.Quiesce).number))
    bench.last(migration_commands.SendManifest)
    bench.table.check("s1", 5, B)
    bench.handle(events.Tick())
    bench.none(migration_commands.SendManifest)
    with pytest.raises(MigrationNotOfferedError):
        bench.table.check("s1", 6, B)


def test_after_the_seal_only_the_row_lets_it_go_on_and_it_asks_for_it() -> None:
    bench, run = sealed()
    bench.handle(events.TransferEnded("s1", 5))
    bench.none(commands.Unquiesce)
    bench.last(commands.Report)
    bench.now += ASK_S
    bench.handle(events.Tick())
    bench.last(commands.Report)
    bench.handle(events.Tick())
    bench.none(commands.Report, commands.Unquiesce)
    bench.handle(events.Renewed(bench.now, (migrating(version=6, control_seq=1),)))
    bench.none(commands.Unquiesce)
    bench.handle(events.Renewed(bench.now, (row(version=7, control_seq=1),)))
    assert bench.last(commands.Unquiesce).run == run
    bench.last(migration_commands.CancelTransfer)


def test_a_committed_migration_frees_the_source() -> None:
    bench, run = sealed()
    bench.handle(events.Assigned(row(version=6, epoch=2, worker=B, own_revision=20)))
    assert bench.last(commands.Evict).run == run
    assert bench.table.entries == {}


def test_a_pause_ends_the_migration_and_suspends_at_the_source() -> None:
    bench, run = sealed()
    bench.handle(events.Assigned(row(version=6, phase=Phase.SUSPENDED)))
    order = [type(command) for command in bench.said if not isinstance(command, commands.Report)]
    assert order == [migration_commands.CancelTransfer, commands.Unquiesce, commands.Suspend]
    assert bench.last(commands.Unquiesce).run == run


def test_the_seal_of_one_connection_is_not_given_to_the_next_without_a_new_word() -> None:
    bench, _ = sealed()
    assert bench.table.offer("s1", 5, B) is False
    bench.handle(events.Tick())
    assert bench.last(migration_commands.SendManifest) == migration_commands.SendManifest("s1", 5, 2)
    bench.handle(events.QuiesceRequested("s1", 5))
    bench.none(commands.Quiesce)
    bench.last(migration_commands.SendFinalDelta)
    bench.handle(events.TransferEnded("s1", 5))
    bench.none(commands.Unquiesce)


def test_a_suspended_session_is_given_from_the_host() -> None:
    bench, run = running()
    suspended: dict[str, Any] = {"phase": Phase.SUSPENDED, "version": 6}
    bench.handle(events.Assigned(row(**suspended)))
    bench.handle(events.Assigned(migrating(**{**suspended, "version": 7, "migration": 7})))
    with pytest.raises(SourceNotReadyError):
        bench.table.offer("s1", 7, B)
    bench.handle(events.MovedToHost("s1", run, 2))
    assert bench.table.offer("s1", 7, B) is True
    bench.handle(events.QuiesceRequested("s1", 7))
    bench.last(migration_commands.SendFinalDelta)
    assert bench.last(migration_commands.SendManifest).next_chunk == 2


def test_a_state_that_is_not_here_cannot_be_given() -> None:
    """Also if the log was not read for it, as for every suspended session without state.

    Incident: the answer was "not ready", its target retried to the end, and a draining worker waited for the
    session without end.
    """
    bench = Bench(worker=A)
    record = migrating(phase=Phase.SUSPENDED)
    bench.handle(events.Assigned(record))
    assert bench.table.entries["s1"].checked is None
    with pytest.raises(NoStateError):
        bench.table.offer("s1", 5, B)


def test_a_target_reports_the_code_of_what_failed() -> None:
    bench = Bench(worker=B)
    bench.handle(
        events.Assigned(migrating(phase=Phase.SUSPENDED), Incoming(record=migrating(phase=Phase.SUSPENDED)))
    )
    run = bench.last(migration_commands.FetchState).run
    bench.handle(events.StateFetchFailed("s1", run, "no_state: gone", NO_STATE))
    assert [(report.stage, report.code) for report in bench.table.incoming.reports()] == [
        (MigrationStage.FAILED, NO_STATE)
    ]


# The target


def test_a_target_keeps_a_slot_copies_reports_and_runs_only_when_its_row_says_so() -> None:
    bench, run = expecting()
    fetch = bench.last(migration_commands.FetchState)
    assert fetch == migration_commands.FetchState("s1", run, 5, FROM, on_host=False)
    assert bench.table.slots_used == 1
    assert bench.table.incoming.reports()[0].stage is MigrationStage.COPYING
    bench.handle(events.StateReceived("s1", run, 2, 0, "d", 100, 0.5))
    bench.last(commands.Report)
    report = bench.table.incoming.reports()[0]
    assert (report.stage, report.next_chunk, report.digest) == (MigrationStage.VERIFIED, 2, "d")
    bench.handle(events.PlayheadMoved("s1", 1.25))
    bench.none(commands.Unquiesce)

    bench.handle(events.Assigned(row(version=6, epoch=2, worker=B, own_revision=20)))
    bench.none(commands.Unquiesce, commands.Admit)
    assert bench.last(commands.SetPlayhead).playhead_s == 1.25
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 2, False))
    assert bench.last(commands.Unquiesce).run == run
    bench.none(commands.Admit, commands.FetchLatents)
    assert bench.table.slots_used == 1
    assert bench.table.incoming.reports() == ()
    bench.handle(events.ChunkPackaged("s1", run, 2, 0))
    assert bench.last(commands.PublishChunk).ownership == (2, 20)


def test_a_target_says_how_long_it_will_try() -> None:
    bench, run = expecting()
    assert bench.table.incoming.reports()[0].limit_s == 0
    bench.handle(events.CopyStarted("s1", run + 1, 300.0))
    assert bench.table.incoming.reports()[0].limit_s == 0
    bench.handle(events.CopyStarted("s1", run, 420.0))
    bench.last(commands.Report)
    report = bench.table.incoming.reports()[0]
    assert (report.stage, report.limit_s) == (MigrationStage.COPYING, 420.0)


def test_the_viewer_has_played_on_since_the_target_heard_of_him() -> None:
    """Incident: the next report came after the next chunk was due, and the chunk was late by as much."""
    bench, _ = verified()
    bench.handle(events.PlayheadMoved("s1", 1.25))
    bench.now += 0.2
    bench.handle(events.Assigned(row(version=6, epoch=2, worker=B, own_revision=20)))
    assert bench.last(commands.SetPlayhead).observed_at == pytest.approx(bench.now - 0.2)


@pytest.mark.parametrize("playing", [True, False])
def test_a_viewer_who_stands_still_has_not_played_on(playing: bool) -> None:
    bench, _ = verified()
    bench.handle(events.PlayheadMoved("s1", 1.25, playing))
    bench.now += 0.2
    # If the row has a newer playhead, its time is unknown.
    later = 1.25 + playing
    bench.handle(events.Assigned(row(version=6, epoch=2, worker=B, own_revision=20, playhead_s=later)))
    found = bench.last(commands.SetPlayhead)
    assert (found.playhead_s, found.observed_at) == (later, bench.now)


def test_a_prompt_that_the_state_was_not_made_under_is_applied_at_the_target() -> None:
    bench, run = verified()
    bench.handle(
        events.Assigned(
            row(version=7, epoch=2, worker=B, own_revision=20, prompt="a blue square", control_seq=1)
        )
    )
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 2, False))
    assert bench.last(commands.SetConditions) == commands.SetConditions("s1", run, 1, "a blue square")


def test_a_state_that_the_log_has_gone_past_is_not_used() -> None:
    bench, run = verified()
    bench.handle(events.Assigned(row(version=6, epoch=2, worker=B, own_revision=20)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 3, False))
    assert bench.last(commands.Evict).run == run
    assert bench.last(commands.FetchLatents).next_chunk == 3


def test_an_owner_of_a_later_epoch_than_the_migrations_does_not_use_its_state() -> None:
    bench, run = verified()
    bench.handle(events.Assigned(row(version=9, epoch=3, worker=B, own_revision=30)))
    assert bench.last(migration_commands.CancelFetch) == migration_commands.CancelFetch("s1", run)
    bench.last(commands.ReadLogEnd)


@pytest.mark.parametrize("how", ["assigned", "renewed", "another migration"])
def test_what_was_copied_goes_when_the_row_names_the_target_no_more(how: str) -> None:
    bench, run = verified()
    if how == "assigned":
        bench.handle(events.Assigned(row(version=6)))
    elif how == "renewed":
        bench.now += 1
        bench.handle(events.Renewed(bench.now, ()))
    else:
        record = migrating(version=9, migration=9)
        bench.handle(events.Assigned(record, Incoming(record=record, source=FROM)))
        assert bench.last(migration_commands.FetchState).migration == 9
    assert bench.last(migration_commands.CancelFetch) == migration_commands.CancelFetch("s1", run)
    assert bench.table.slots_used == (how == "another migration")


def test_an_answer_that_is_older_than_the_hint_does_not_end_the_copy() -> None:
    bench, _ = expecting()
    bench.handle(events.Renewed(bench.now - 1, ()))
    bench.none(migration_commands.CancelFetch)
    assert bench.table.slots_used == 1


def test_an_old_hint_does_not_bring_a_migration_back() -> None:
    bench, _ = expecting()
    bench.handle(events.Assigned(row(version=6)))
    record = migrating()
    bench.handle(events.Assigned(record, Incoming(record=record, source=FROM)))
    bench.none(migration_commands.FetchState)


def test_a_copy_that_failed_is_reported_and_takes_no_slot_and_is_not_tried_again() -> None:
    bench, run = expecting()
    bench.handle(events.StateFetchFailed("s1", run, "peer_lost: gone"))
    report = bench.table.incoming.reports()[0]
    assert (report.stage, report.reason) == (MigrationStage.FAILED, "peer_lost: gone")
    assert bench.table.slots_used == 0
    record = migrating(version=6)
    bench.handle(events.Renewed(bench.now, (), incoming=(Incoming(record=record, source=FROM),)))
    bench.none(migration_commands.FetchState)


def test_no_slot_and_another_model_are_failures_at_once() -> None:
    bench = Bench(worker=B, capacity=1)
    first, second, other = migrating(), migrating(id="s2"), migrating(id="s3", model="other")
    for record in (first, second, other):
        bench.handle(events.Assigned(record, Incoming(record=record, source=FROM)))
    reasons = {report.session: report.reason for report in bench.table.incoming.reports()}
    assert reasons["s1"] is None
    assert "slots" in (reasons["s2"] or "")
    assert "serves toyworld, not other" in (reasons["s3"] or "")
    assert bench.table.slots_used == 1


def test_a_suspended_session_needs_no_slot_and_wakes_from_the_host() -> None:
    bench, run = verified(phase=Phase.SUSPENDED)
    assert bench.table.slots_used == 0
    bench.handle(events.Assigned(row(version=6, epoch=2, worker=B, own_revision=20, phase=Phase.SUSPENDED)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 2, False))
    bench.none(commands.Unquiesce, commands.Suspend, commands.Evict)
    assert [held.resident for held in bench.table.held(lambda index: 0.0)] == [False]
    bench.handle(events.Assigned(row(version=7, epoch=3, worker=B, own_revision=30)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 2, False))
    assert bench.last(commands.Resume).run == run
