"""The session table, rule by rule: where a session starts, and how its chunks enter the log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.worker.table_bench import Bench, row
from turboserve.contracts.sessions import Phase
from turboserve.worker.service import commands, events
from turboserve.worker.service.session_reconciler import RECHECK_S


def test_a_placed_session_starts_at_the_end_of_its_log() -> None:
    bench = Bench()
    admit = bench.run_from(row())
    assert (admit.prompt, admit.seed, admit.next_chunk) == ("a red circle", 7, 0)


def test_a_session_from_elsewhere_waits_for_its_latents() -> None:
    assert Bench().run_from(row(epoch=3, next_chunk=5), log_end=9).next_chunk == 9


def test_a_worker_that_is_to_drain_reports_it_at_once() -> None:
    """The order comes with the answer to a heartbeat. Its sessions stayed until the heartbeat after that."""
    bench = Bench()
    bench.renew()
    bench.none(commands.Report)
    order = events.Renewed(bench.now, (), drain=True)
    bench.handle(order)
    bench.last(commands.Report)
    assert bench.table.draining
    # The answer to that report has it, too.
    bench.handle(order)
    bench.none(commands.Report)


def test_where_the_log_is_gone_the_row_says_how_far_it_came() -> None:
    bench = Bench()
    bench.handle(events.Assigned(row(next_chunk=40)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    assert bench.last(commands.FetchLatents).next_chunk == 40


def test_where_the_log_is_lost_its_owner_goes_on_behind_what_viewers_have_seen() -> None:
    """The broker's disk was lost; the store had not read the newest chunks, and its row is behind."""
    bench = Bench()
    run = bench.run_from(row()).run
    for index in range(3):
        bench.package("s1", run, index)
        bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
    bench.package("s1", run, 3)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.FENCED)
    bench.renew(row(version=3, next_chunk=1, own_revision=1))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    bench.none(commands.Evict)
    publish = bench.last(commands.PublishChunk)
    assert (publish.index, publish.ownership) == (3, (1, 1))
    # Their latents keep their epoch for later owners.
    assert (publish.began, publish.before) == (0, 0)


@pytest.mark.parametrize("in_slab", [True, False])
def test_where_the_log_is_lost_the_next_chunk_does_not_wait_for_viewers(in_slab: bool) -> None:
    """They wait for a chunk that was lost, and notice its loss with the next one. It is requested once."""
    bench = Bench()
    if in_slab:
        run = bench.run_from(row()).run
        bench.none(commands.GenerateNext)
        for index in range(3):
            bench.package("s1", run, index)
            bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
        bench.renew(row(version=3, own_revision=4))
        bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    else:
        bench.handle(events.Assigned(row(next_chunk=3)))
        bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
        bench.handle(events.LatentsFetched("s1", bench.last(commands.FetchLatents).query))
        run = bench.last(commands.Admit).run
    assert bench.last(commands.GenerateNext).run == run
    bench.handle(events.Tick(), bench.now + 1)
    bench.none(commands.GenerateNext)

    # A state that left its slab before the chunk was made forgot the request.
    suspended = row(version=4, own_revision=4, next_chunk=3, phase=Phase.SUSPENDED)
    bench.handle(events.Assigned(suspended if in_slab else suspended.model_copy(update={"own_revision": 10})))
    bench.last(commands.Suspend)
    bench.handle(events.MovedToHost("s1", run, 3))
    active: dict[str, Any] = {"version": 5, "next_chunk": 3, "own_revision": 4 if in_slab else 10}
    bench.handle(events.Assigned(row(**active)))
    bench.last(commands.Resume)
    assert bench.last(commands.GenerateNext).run == run

    bench.package("s1", run, 3)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
    bench.handle(events.Assigned(row(**active | {"version": 6, "phase": Phase.SUSPENDED})))
    bench.handle(events.MovedToHost("s1", run, 4))
    bench.handle(events.Assigned(row(**active | {"version": 7})))
    bench.last(commands.Resume)
    bench.none(commands.GenerateNext)


def test_the_log_is_read_again_after_its_fence_was_lost() -> None:
    """Also where the new log has the fence at the same sequence."""
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
    bench.handle(events.Assigned(row(version=3, own_revision=None)))
    bench.none(commands.ReadLogEnd)
    bench.handle(events.Assigned(row(version=3)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    assert bench.last(commands.GenerateNext).run == run


def test_the_log_is_read_again_although_the_row_without_a_fence_was_missed() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
    bench.handle(events.Assigned(row(version=3, log_losses=1)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    assert bench.last(commands.GenerateNext).run == run
    bench.renew(row(version=3, log_losses=1))
    bench.none(commands.ReadLogEnd)


def with_a_chunk_of_unknown_outcome() -> tuple[Bench, int]:
    """Chunk 0 is in the log, and the broker has not answered about chunk 1. Also returns the run's number."""
    bench = Bench()
    run = bench.run_from(row()).run
    acked(bench, run, 1)
    bench.package("s1", run, 1)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.UNKNOWN)
    return bench, run


def test_a_chunk_that_only_the_row_has_counted_is_this_workers_own_if_no_other_owned_the_session() -> None:
    """The broker accepted chunk 1 and lost its disk before the worker heard of it."""
    bench, run = with_a_chunk_of_unknown_outcome()
    bench.handle(events.Assigned(row(version=3, log_losses=1, next_chunk=2)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    bench.none(commands.Evict)
    assert bench.last(commands.ForgetChunk).index == 1
    assert bench.last(commands.GenerateNext).run == run
    publish = bench.package("s1", run, 2)
    assert [each.index for each in publish if isinstance(each, commands.PublishChunk)] == [2]


def test_a_chunk_that_another_owner_may_have_made_is_not_this_workers() -> None:
    bench, run = with_a_chunk_of_unknown_outcome()
    # The session was elsewhere at epoch 2.
    bench.handle(events.Assigned(row(version=5, epoch=3, own_revision=12, log_losses=1, next_chunk=2)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    assert bench.last(commands.Evict).run == run


def test_a_row_of_a_lost_log_makes_an_answer_of_that_log_void() -> None:
    bench = Bench()
    bench.handle(events.Assigned(row()))
    first = bench.last(commands.ReadLogEnd).query
    bench.handle(events.Assigned(row(version=3, log_losses=1)))
    second = bench.last(commands.ReadLogEnd).query
    bench.handle(events.LogEndRead("s1", first, 4, False, 1))
    bench.none(commands.FetchLatents, commands.Admit)
    bench.handle(events.LogEndRead("s1", second, 0, False))
    assert bench.last(commands.Admit).next_chunk == 0


def acked(bench: Bench, run: int, chunks: int) -> None:
    """Publish chunks 0, 1, …, at stream sequences 20, 21, …"""
    for index in range(chunks):
        bench.package("s1", run, index)
        bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED, sequence=20 + index)


def test_a_log_that_has_lost_its_end_gets_the_next_chunk_at_once() -> None:
    """The broker was away, and came back with the fence and without the newest chunks."""
    bench = Bench()
    run = bench.run_from(row()).run
    acked(bench, run, 3)
    bench.handle(events.Reconnected())
    read = bench.last(commands.ReadLogEnd)
    assert read.known == (2, 22)
    bench.handle(events.LogEndRead("s1", read.query, 1, True, 1, sequence=20, known_lost=True))
    assert bench.last(commands.GenerateNext).run == run
    bench.package("s1", run, 3)
    publish = bench.last(commands.PublishChunk)
    assert (publish.index, publish.contiguous_from) == (3, 3)
    bench.outcome(publish, events.PublishOutcome.ACKED, sequence=21)
    bench.package("s1", run, 4)
    assert bench.last(commands.PublishChunk).contiguous_from == 3


def test_a_log_that_has_lost_nothing_changes_nothing() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    acked(bench, run, 3)
    bench.handle(events.Reconnected())
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 3, True, 1, sequence=22))
    bench.none(commands.GenerateNext)
    bench.package("s1", run, 3)
    assert bench.last(commands.PublishChunk).contiguous_from == 0


def test_a_chunk_in_flight_while_the_broker_was_away_does_not_hide_the_loss() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    acked(bench, run, 3)
    bench.package("s1", run, 3)
    publish = bench.last(commands.PublishChunk)
    bench.handle(events.Reconnected())
    # The outcome may still change the log's end.
    bench.none(commands.ReadLogEnd)
    bench.outcome(publish, events.PublishOutcome.ACKED, sequence=21)
    read = bench.last(commands.ReadLogEnd)
    assert read.known == (2, 22)
    bench.handle(events.LogEndRead("s1", read.query, 4, True, 1, sequence=21, known_lost=True))
    bench.last(commands.GenerateNext)
    bench.package("s1", run, 4)
    assert bench.last(commands.PublishChunk).contiguous_from == 3


def test_a_loss_is_found_although_the_new_connection_is_not_noticed() -> None:
    """The broker was away for long. Chunk 3 and the query waited for it, and were sent together."""
    bench = Bench()
    run = bench.run_from(row()).run
    acked(bench, run, 3)
    bench.package("s1", run, 3)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.UNKNOWN)
    bench.handle(events.Tick(), bench.now + RECHECK_S)
    read = bench.last(commands.ReadLogEnd)
    assert read.known == (2, 22)
    bench.handle(events.LogEndRead("s1", read.query, 4, True, 1, sequence=21, known_lost=True))
    assert bench.last(commands.GenerateNext).run == run
    bench.package("s1", run, 4)
    assert bench.last(commands.PublishChunk).contiguous_from == 3


def test_an_owner_that_has_seen_no_log_looks_for_no_chunk() -> None:
    bench = Bench()
    bench.handle(events.Assigned(row(next_chunk=5)))
    assert bench.last(commands.ReadLogEnd).known is None


def test_an_answer_during_a_publication_does_not_end_the_doubt() -> None:
    """The row changes while chunk 3 is in flight, then the broker is away."""
    bench = Bench()
    run = bench.run_from(row()).run
    acked(bench, run, 3)
    bench.package("s1", run, 3)
    publish = bench.last(commands.PublishChunk)
    bench.handle(events.Assigned(row(version=3, own_revision=11)))
    read = bench.last(commands.ReadLogEnd)
    bench.handle(events.Reconnected())
    bench.none(commands.ReadLogEnd)
    bench.handle(events.LogEndRead("s1", read.query, 4, True, 1, sequence=21))
    bench.outcome(publish, events.PublishOutcome.ACKED, sequence=21)
    assert bench.last(commands.ReadLogEnd).known == (2, 22)


def test_a_loss_is_not_forgotten_when_the_broker_is_away_again_before_the_next_chunk() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    acked(bench, run, 3)
    bench.package("s1", run, 3)
    publish = bench.last(commands.PublishChunk)
    bench.handle(events.Reconnected())
    bench.outcome(publish, events.PublishOutcome.ACKED, sequence=21)
    read = bench.last(commands.ReadLogEnd)
    bench.handle(events.LogEndRead("s1", read.query, 4, True, 1, sequence=21, known_lost=True))
    bench.handle(events.Reconnected())
    read = bench.last(commands.ReadLogEnd)
    assert read.known == (3, 21)
    bench.handle(events.LogEndRead("s1", read.query, 4, True, 1, sequence=21))
    bench.last(commands.GenerateNext)
    bench.package("s1", run, 4)
    assert bench.last(commands.PublishChunk).contiguous_from == 3


def test_a_chunk_that_the_log_has_from_an_earlier_attempt_does_not_show_a_loss() -> None:
    """Its header may be from before the loss was known."""
    bench = Bench()
    run = bench.run_from(row()).run
    acked(bench, run, 3)
    bench.handle(events.Reconnected())
    read = bench.last(commands.ReadLogEnd)
    bench.handle(events.LogEndRead("s1", read.query, 2, True, 1, sequence=21, known_lost=True))
    bench.last(commands.GenerateNext)
    bench.package("s1", run, 3)
    publish = bench.last(commands.PublishChunk)
    bench.outcome(publish, events.PublishOutcome.ACKED, sequence=22, duplicate=True)
    bench.last(commands.GenerateNext)
    bench.package("s1", run, 4)
    publish = bench.last(commands.PublishChunk)
    assert publish.contiguous_from == 3
    bench.outcome(publish, events.PublishOutcome.ACKED, sequence=23)
    bench.none(commands.GenerateNext)


def test_a_new_owner_passes_on_from_where_the_log_has_lost_nothing() -> None:
    bench = Bench()
    bench.handle(events.Assigned(row()))
    read = bench.last(commands.ReadLogEnd)
    bench.handle(events.LogEndRead("s1", read.query, 6, False, 1, contiguous_from=4, sequence=30))
    bench.handle(events.LatentsFetched("s1", bench.last(commands.FetchLatents).query))
    run = bench.last(commands.Admit).run
    bench.package("s1", run, 6)
    assert bench.last(commands.PublishChunk).contiguous_from == 4


def test_a_refusal_by_a_lost_log_does_not_outlive_it() -> None:
    """The new stream counts from 1, and may have the fence at the sequence of the lost one."""
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.FENCED)
    bench.last(commands.PauseGeneration)
    bench.renew(row(version=3, own_revision=None))
    bench.none(commands.PublishChunk)
    bench.renew(row(version=3, own_revision=10))
    bench.none(commands.PublishChunk)
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    bench.last(commands.ResumeGeneration)
    assert bench.last(commands.PublishChunk).ownership == (1, 10)


def test_a_late_refusal_by_a_lost_log_does_not_stop_its_owner() -> None:
    """The row with the new fence overtakes the broker's answer."""
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    publish = bench.last(commands.PublishChunk)
    bench.renew(row(version=3))
    bench.outcome(publish, events.PublishOutcome.FENCED)
    bench.none(commands.PauseGeneration)
    again = bench.last(commands.PublishChunk)
    # The second answer is about the row that the worker knows.
    bench.outcome(again, events.PublishOutcome.FENCED)
    bench.last(commands.PauseGeneration)
    bench.none(commands.PublishChunk)


def test_a_row_whose_fence_is_not_in_the_log_yet_waits() -> None:
    bench = Bench()
    bench.handle(events.Assigned(row(own_revision=None)))
    bench.none(commands.ReadLogEnd)
    bench.handle(events.Assigned(row(own_revision=12)))
    bench.last(commands.ReadLogEnd)


def test_chunks_are_published_one_at_a_time_and_in_order() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    first = bench.last(commands.PublishChunk)
    assert (first.index, first.before) == (0, 0)
    bench.package("s1", run, 1)
    bench.none(commands.PublishChunk)
    bench.outcome(first, events.PublishOutcome.ACKED)
    assert bench.last(commands.ForgetChunk).index == 0
    assert bench.last(commands.PublishChunk).index == 1


def test_an_unknown_outcome_is_repeated_with_back_off_until_it_is_known() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    publish = bench.last(commands.PublishChunk)
    waits = []
    for _ in range(8):
        bench.outcome(publish, events.PublishOutcome.UNKNOWN)
        bench.none(commands.PublishChunk)
        started = bench.now
        while not any(isinstance(command, commands.PublishChunk) for command in bench.said):
            bench.handle(events.Tick(), bench.now + 0.05)
        # The first attempt has sent the latents.
        assert bench.last(commands.PublishChunk) == replace(publish, before=None)
        waits.append(bench.now - started)
    assert waits == sorted(waits)
    assert waits[0] < 0.2
    assert waits[-1] <= 2.1
    bench.outcome(publish, events.PublishOutcome.ACKED)
    assert bench.table.entries["s1"].next_publish == 1


def test_after_a_long_silence_the_log_is_read_before_the_chunk_is_appended_again() -> None:
    """The broker recognizes a repeated message for two minutes only, and a chunk must not be stored twice."""
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    bench.package("s1", run, 1)
    publish = commands.PublishChunk("s1", run, 0, (1, 10), 0)
    bench.outcome(publish, events.PublishOutcome.UNKNOWN)
    bench.handle(events.Tick(), bench.now + 31)
    query = bench.last(commands.ReadLogEnd).query
    bench.none(commands.PublishChunk)
    bench.handle(events.Tick(), bench.now + 31)
    bench.none(commands.PublishChunk)
    bench.handle(events.LogEndRead("s1", query, 1, True))
    assert bench.last(commands.ForgetChunk).index == 0
    assert bench.last(commands.PublishChunk).index == 1


def test_after_the_broker_refused_nothing_is_published_until_the_row_names_a_new_ownership() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.FENCED)
    bench.last(commands.PauseGeneration)
    bench.last(commands.Report)
    bench.renew(row())
    bench.none(commands.PublishChunk)
    bench.handle(events.Tick(), bench.now + 60)
    bench.none(commands.PublishChunk)

    bench.renew(row(version=3, epoch=2, own_revision=20))
    bench.none(commands.PublishChunk)
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    bench.last(commands.ResumeGeneration)
    publish = bench.last(commands.PublishChunk)
    assert (publish.index, publish.ownership) == (0, (2, 20))


def test_a_refused_worker_whose_session_went_elsewhere_lets_go_of_everything() -> None:
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.FENCED)
    bench.renew(asked_at=bench.now + 1)
    assert bench.last(commands.Evict).run == run
    assert bench.table.entries == {}
    bench.package("s1", run, 1)
    assert bench.last(commands.ForgetChunk).index == 1


def test_a_state_that_someone_else_went_past_is_dropped_and_rebuilt() -> None:
    """It was here at epoch 1, elsewhere at 2, and returns at 3: the state on the host is old."""
    bench = Bench()
    run = bench.run_from(row()).run
    bench.package("s1", run, 0)
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
    bench.handle(events.Assigned(row(version=3, phase=Phase.SUSPENDED)))
    bench.handle(events.MovedToHost("s1", run, 1))
    bench.renew(row(version=9, epoch=3, own_revision=30))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 6, False, 2))
    assert bench.last(commands.Evict).run == run
    fetch = bench.last(commands.FetchLatents)
    assert (fetch.next_chunk, fetch.epoch) == (6, 2)
    bench.handle(events.LatentsFetched("s1", fetch.query))
    assert bench.last(commands.Admit).next_chunk == 6


def test_latents_say_where_their_epoch_began_and_which_was_before() -> None:
    """The next owner can thereby tell the latents of chunks in the log from those that the broker refused."""
    bench = Bench()
    bench.handle(events.Assigned(row(epoch=4, own_revision=40)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 6, False, 2))
    bench.handle(events.LatentsFetched("s1", bench.last(commands.FetchLatents).query))
    run = bench.last(commands.Admit).run
    for index in (6, 7):
        bench.package("s1", run, index)
        sent = bench.last(commands.PublishChunk)
        assert (sent.index, sent.ownership[0], sent.began, sent.before) == (index, 4, 6, 2)
        bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
    # The same worker under the next epoch.
    bench.handle(events.Assigned(row(version=3, epoch=5, own_revision=50)))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 8, True, 4))
    bench.package("s1", run, 8)
    sent = bench.last(commands.PublishChunk)
    assert (sent.ownership[0], sent.began, sent.before) == (5, 8, 4)
    # An end that is read again under one epoch does not change where that epoch began.
    bench.outcome(bench.last(commands.PublishChunk), events.PublishOutcome.ACKED)
    bench.table.entries["s1"].checked = None
    bench.handle(events.Tick())
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 9, True, 5))
    bench.package("s1", run, 9)
    assert bench.last(commands.PublishChunk).began == 8


def test_a_report_has_the_lead_of_what_is_made_and_the_next_chunk_of_what_is_in_the_log() -> None:
    """The viewer gets chunks that still wait for their publication, so they count in the lead."""
    bench = Bench()
    admit = bench.run_from(row())
    bench.package("s1", admit.run, 0)
    publish = bench.last(commands.PublishChunk)
    bench.package("s1", admit.run, 1)
    bench.handle(events.PlayheadMoved("s1", 0.5, True, bench.now))
    [held] = bench.table.held(lambda chunk: 0.75 * chunk)
    assert (held.next_chunk, held.lead_s) == (0, 1.0)
    bench.outcome(publish, events.PublishOutcome.ACKED, 11)
    [held] = bench.table.held(lambda chunk: 0.75 * chunk)
    assert (held.next_chunk, held.lead_s) == (1, 1.0)
