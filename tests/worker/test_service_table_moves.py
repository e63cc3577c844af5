"""Moves in the session table: the rules of both roles, one by one."""

from __future__ import annotations

import pytest
from table_bench import Bench
from table_moves import FROM, A, B, expecting, moving, row, running, sealed, verified

from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import NO_STATE, Incoming, MoveStage
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.service.departures import ASK_S
from turboserve.worker.transfer.errors import NoState, NotOffered, NotReady

# The source


@pytest.mark.parametrize(("move", "target"), [(4, B), (6, B), (5, "wrk_c")])
def test_state_is_given_only_for_the_move_that_the_row_names(move: int, target: str) -> None:
    bench, _ = running()
    with pytest.raises(NotOffered):
        bench.table.offer("s1", 5, B)
    bench.tell(told.Assigned(moving()))
    with pytest.raises(NotOffered):
        bench.table.offer("s1", move, target)
    with pytest.raises(NotOffered):
        bench.table.offer("s2", 5, B)
    assert bench.table.offer("s1", 5, B) is False


def test_it_goes_on_generating_while_the_bulk_is_copied_and_publishes_to_the_end() -> None:
    bench, run = running()
    bench.tell(told.Assigned(moving()))
    bench.none(do.Freeze, do.Halt)
    bench.table.offer("s1", 5, B)
    bench.tell(told.FreezeWanted("s1", 5))
    number = bench.last(do.Freeze).number
    bench.tell(told.ChunkPackaged("s1", run, 2, 0))
    bench.tell(told.Frozen("s1", run, 3, number))
    bench.last(do.GiveRest)
    bench.none(do.GiveSeal)
    bench.tell(told.Published("s1", run, 2, (1, 10), told.Outcome.ACKED))
    assert bench.last(do.GiveSeal).next_chunk == 3


def test_a_target_that_hangs_up_before_the_seal_lets_it_go_on() -> None:
    bench, run = running()
    bench.tell(told.Assigned(moving()))
    bench.table.offer("s1", 5, B)
    bench.tell(told.FreezeWanted("s1", 5))
    bench.tell(told.Frozen("s1", run, 2, bench.last(do.Freeze).number))
    bench.tell(told.GiftBroken("s1", 5))
    assert bench.last(do.Thaw).run == run
    assert bench.table.offer("s1", 5, B) is False


def test_that_it_stood_still_for_an_attempt_that_is_over_means_nothing_to_the_next() -> None:
    """The late word gave the rest of a session away that had gone on by then."""
    bench, run = running()
    bench.tell(told.Assigned(moving()))
    bench.table.offer("s1", 5, B)
    bench.tell(told.FreezeWanted("s1", 5))
    first = bench.last(do.Freeze).number
    bench.tell(told.GiftBroken("s1", 5))
    bench.last(do.Thaw)
    bench.table.offer("s1", 5, B)
    bench.tell(told.FreezeWanted("s1", 5))
    second = bench.last(do.Freeze).number
    bench.tell(told.Frozen("s1", run, 2, first))
    bench.none(do.GiveRest, do.GiveSeal)
    bench.tell(told.ChunkPackaged("s1", run, 2, 0))
    bench.tell(told.Published("s1", run, 2, (1, 10), told.Outcome.ACKED))
    bench.tell(told.Frozen("s1", run, 3, second))
    assert bench.last(do.GiveSeal).next_chunk == 3


def test_a_connection_that_takes_the_place_of_another_waits_for_the_same_standing_still() -> None:
    bench, run = running()
    bench.tell(told.Assigned(moving()))
    bench.table.offer("s1", 5, B)
    bench.tell(told.FreezeWanted("s1", 5))
    number = bench.last(do.Freeze).number
    bench.table.offer("s1", 5, B)
    bench.tell(told.FreezeWanted("s1", 5))
    bench.none(do.Freeze)
    bench.tell(told.Frozen("s1", run, 2, number))
    bench.last(do.GiveRest)


def test_asking_whether_it_may_have_the_state_changes_nothing() -> None:
    bench, run = running()
    bench.tell(told.Assigned(moving()))
    bench.table.offer("s1", 5, B)
    bench.tell(told.FreezeWanted("s1", 5))
    bench.tell(told.Frozen("s1", run, 2, bench.last(do.Freeze).number))
    bench.last(do.GiveSeal)
    bench.table.check("s1", 5, B)
    bench.tell(told.Tick())
    bench.none(do.GiveSeal)
    with pytest.raises(NotOffered):
        bench.table.check("s1", 6, B)


def test_after_the_seal_only_the_row_lets_it_go_on_and_it_asks_for_it() -> None:
    bench, run = sealed()
    bench.tell(told.GiftBroken("s1", 5))
    bench.none(do.Thaw)
    bench.last(do.Report)
    bench.now += ASK_S
    bench.tell(told.Tick())
    bench.last(do.Report)
    bench.tell(told.Tick())
    bench.none(do.Report, do.Thaw)
    bench.tell(told.Renewed(bench.now, (moving(version=6, control_seq=1),)))
    bench.none(do.Thaw)
    bench.tell(told.Renewed(bench.now, (row(version=7, control_seq=1),)))
    assert bench.last(do.Thaw).run == run
    bench.last(do.EndGift)


def test_a_committed_move_frees_the_source() -> None:
    bench, run = sealed()
    bench.tell(told.Assigned(row(version=6, epoch=2, worker=B, own_revision=20)))
    assert bench.last(do.Evict).run == run
    assert bench.table.entries == {}


def test_a_pause_ends_the_move_and_suspends_at_the_source() -> None:
    bench, run = sealed()
    bench.tell(told.Assigned(row(version=6, phase=Phase.SUSPENDED)))
    order = [type(command) for command in bench.said if not isinstance(command, do.Report)]
    assert order == [do.EndGift, do.Thaw, do.Suspend]
    assert bench.last(do.Thaw).run == run


def test_the_seal_of_one_connection_is_not_given_to_the_next_without_a_new_word() -> None:
    bench, _ = sealed()
    assert bench.table.offer("s1", 5, B) is False
    bench.tell(told.Tick())
    assert bench.last(do.GiveSeal) == do.GiveSeal("s1", 5, 2)
    bench.tell(told.FreezeWanted("s1", 5))
    bench.none(do.Freeze)
    bench.last(do.GiveRest)
    bench.tell(told.GiftBroken("s1", 5))
    bench.none(do.Thaw)


def test_a_suspended_session_is_given_from_the_host() -> None:
    bench, run = running()
    asleep = {"phase": Phase.SUSPENDED, "version": 6}
    bench.tell(told.Assigned(row(**asleep)))
    bench.tell(told.Assigned(moving(**{**asleep, "version": 7, "move": 7})))
    with pytest.raises(NotReady):
        bench.table.offer("s1", 7, B)
    bench.tell(told.MovedToHost("s1", run, 2))
    assert bench.table.offer("s1", 7, B) is True
    bench.tell(told.FreezeWanted("s1", 7))
    bench.last(do.GiveRest)
    assert bench.last(do.GiveSeal).next_chunk == 2


def test_a_state_that_is_not_here_cannot_be_given() -> None:
    """Also where the log was not read for it, as for every suspended session without state: the answer was
    "not ready", its target tried to the end, and a worker that drained waited for the session without end."""
    bench = Bench(worker=A)
    record = moving(phase=Phase.SUSPENDED)
    bench.tell(told.Assigned(record))
    assert bench.table.entries["s1"].checked is None
    with pytest.raises(NoState):
        bench.table.offer("s1", 5, B)


def test_a_target_reports_the_code_of_what_failed() -> None:
    bench = Bench(worker=B)
    bench.tell(told.Assigned(moving(phase=Phase.SUSPENDED), Incoming(record=moving(phase=Phase.SUSPENDED))))
    run = bench.last(do.Fetch).run
    bench.tell(told.ArrivalFailed("s1", run, "no_state: gone", NO_STATE))
    assert [(report.stage, report.code) for report in bench.table.arrivals.reports()] == [
        (MoveStage.FAILED, NO_STATE)
    ]


# The target


def test_a_target_keeps_a_slot_copies_reports_and_runs_only_when_its_row_says_so() -> None:
    bench, run = expecting()
    fetch = bench.last(do.Fetch)
    assert fetch == do.Fetch("s1", run, 5, FROM, on_host=False)
    assert bench.table.slots_used == 1
    assert bench.table.arrivals.reports()[0].stage is MoveStage.COPYING
    bench.tell(told.Arrived("s1", run, 2, 0, "d", 100, 0.5))
    bench.last(do.Report)
    report = bench.table.arrivals.reports()[0]
    assert (report.stage, report.next_chunk, report.digest) == (MoveStage.VERIFIED, 2, "d")
    bench.tell(told.PlayheadMoved("s1", 1.25))
    bench.none(do.Thaw)

    bench.tell(told.Assigned(row(version=6, epoch=2, worker=B, own_revision=20)))
    bench.none(do.Thaw, do.Admit)
    assert bench.last(do.SetPlayhead).playhead_s == 1.25
    bench.tell(told.LogEndRead("s1", bench.last(do.ReadLogEnd).query, 2, False))
    assert bench.last(do.Thaw).run == run
    bench.none(do.Admit, do.FetchLatents)
    assert bench.table.slots_used == 1
    assert bench.table.arrivals.reports() == ()
    bench.tell(told.ChunkPackaged("s1", run, 2, 0))
    assert bench.last(do.PublishChunk).ownership == (2, 20)


def test_a_target_says_how_long_it_will_try() -> None:
    bench, run = expecting()
    assert bench.table.arrivals.reports()[0].limit_s == 0
    bench.tell(told.CopyBegins("s1", run + 1, 300.0))
    assert bench.table.arrivals.reports()[0].limit_s == 0
    bench.tell(told.CopyBegins("s1", run, 420.0))
    bench.last(do.Report)
    report = bench.table.arrivals.reports()[0]
    assert (report.stage, report.limit_s) == (MoveStage.COPYING, 420.0)


def test_the_viewer_has_played_on_since_the_target_heard_of_him() -> None:
    """His next report came after the next chunk was due, which came late by as much."""
    bench, _ = verified()
    bench.tell(told.PlayheadMoved("s1", 1.25))
    bench.now += 0.2
    bench.tell(told.Assigned(row(version=6, epoch=2, worker=B, own_revision=20)))
    assert bench.last(do.SetPlayhead).age_s == pytest.approx(0.2)


@pytest.mark.parametrize("playing", [True, False])
def test_a_viewer_who_stands_still_has_not_played_on(playing: bool) -> None:
    bench, _ = verified()
    bench.tell(told.PlayheadMoved("s1", 1.25, playing))
    bench.now += 0.2
    # Where the row knows better, nobody knows since when.
    later = 1.25 + playing
    bench.tell(told.Assigned(row(version=6, epoch=2, worker=B, own_revision=20, playhead_s=later)))
    assert (bench.last(do.SetPlayhead).playhead_s, bench.last(do.SetPlayhead).age_s) == (later, 0.0)


def test_a_prompt_that_the_state_was_not_made_under_is_applied_at_the_target() -> None:
    bench, run = verified()
    bench.tell(
        told.Assigned(
            row(version=7, epoch=2, worker=B, own_revision=20, prompt="a blue square", control_seq=1)
        )
    )
    bench.tell(told.LogEndRead("s1", bench.last(do.ReadLogEnd).query, 2, False))
    assert bench.last(do.SetPrompt) == do.SetPrompt("s1", run, 1, "a blue square")


def test_a_state_that_the_log_has_gone_past_is_not_used() -> None:
    bench, run = verified()
    bench.tell(told.Assigned(row(version=6, epoch=2, worker=B, own_revision=20)))
    bench.tell(told.LogEndRead("s1", bench.last(do.ReadLogEnd).query, 3, False))
    assert bench.last(do.Evict).run == run
    assert bench.last(do.FetchLatents).next_chunk == 3


def test_an_owner_of_a_later_epoch_than_the_moves_does_not_use_its_state() -> None:
    bench, run = verified()
    bench.tell(told.Assigned(row(version=9, epoch=3, worker=B, own_revision=30)))
    assert bench.last(do.DropArrival) == do.DropArrival("s1", run)
    bench.last(do.ReadLogEnd)


@pytest.mark.parametrize("how", ["assigned", "renewed", "another move"])
def test_what_was_copied_goes_when_the_row_names_the_target_no_more(how: str) -> None:
    bench, run = verified()
    if how == "assigned":
        bench.tell(told.Assigned(row(version=6)))
    elif how == "renewed":
        bench.now += 1
        bench.tell(told.Renewed(bench.now, ()))
    else:
        record = moving(version=9, move=9)
        bench.tell(told.Assigned(record, Incoming(record=record, source=FROM)))
        assert bench.last(do.Fetch).move == 9
    assert bench.last(do.DropArrival) == do.DropArrival("s1", run)
    assert bench.table.slots_used == (how == "another move")


def test_an_answer_that_is_older_than_the_hint_does_not_end_the_copy() -> None:
    bench, _ = expecting()
    bench.tell(told.Renewed(bench.now - 1, ()))
    bench.none(do.DropArrival)
    assert bench.table.slots_used == 1


def test_an_old_hint_does_not_bring_a_move_back() -> None:
    bench, _ = expecting()
    bench.tell(told.Assigned(row(version=6)))
    record = moving()
    bench.tell(told.Assigned(record, Incoming(record=record, source=FROM)))
    bench.none(do.Fetch)


def test_a_copy_that_failed_is_reported_and_takes_no_slot_and_is_not_tried_again() -> None:
    bench, run = expecting()
    bench.tell(told.ArrivalFailed("s1", run, "peer_lost: gone"))
    report = bench.table.arrivals.reports()[0]
    assert (report.stage, report.reason) == (MoveStage.FAILED, "peer_lost: gone")
    assert bench.table.slots_used == 0
    record = moving(version=6)
    bench.tell(told.Renewed(bench.now, (), incoming=(Incoming(record=record, source=FROM),)))
    bench.none(do.Fetch)


def test_no_slot_and_another_model_are_failures_at_once() -> None:
    bench = Bench(worker=B, capacity=1)
    first, second, other = moving(), moving(id="s2"), moving(id="s3", model="other")
    for record in (first, second, other):
        bench.tell(told.Assigned(record, Incoming(record=record, source=FROM)))
    reasons = {report.session: report.reason for report in bench.table.arrivals.reports()}
    assert reasons["s1"] is None
    assert "slots" in (reasons["s2"] or "")
    assert "serves toyworld, not other" in (reasons["s3"] or "")
    assert bench.table.slots_used == 1


def test_a_suspended_session_needs_no_slot_and_wakes_from_the_host() -> None:
    bench, run = verified(phase=Phase.SUSPENDED)
    assert bench.table.slots_used == 0
    bench.tell(told.Assigned(row(version=6, epoch=2, worker=B, own_revision=20, phase=Phase.SUSPENDED)))
    bench.tell(told.LogEndRead("s1", bench.last(do.ReadLogEnd).query, 2, False))
    bench.none(do.Thaw, do.Suspend, do.Evict)
    assert [held.resident for held in bench.table.held(lambda index: 0.0)] == [False]
    bench.tell(told.Assigned(row(version=7, epoch=3, worker=B, own_revision=30)))
    bench.tell(told.LogEndRead("s1", bench.last(do.ReadLogEnd).query, 2, False))
    assert bench.last(do.Resume).run == run
