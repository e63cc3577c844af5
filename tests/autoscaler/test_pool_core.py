"""The pool's core, event by event: orders of events that the simulation produces too rarely."""

from __future__ import annotations

from tests.autoscaler.autoscaler_bench import Bench, row
from turboserve.autoscaler.lifecycle import Policy
from turboserve.autoscaler.messages import (
    DeclareGone,
    Done,
    Drain,
    Exited,
    Failed,
    Launch,
    ListProviderWorkers,
    ListWorkers,
    ProviderWorkersListed,
    Release,
    Reserve,
    RunningWorker,
    SizeWanted,
    Tick,
    WorkersListed,
)
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.workers import WorkerPhase


def test_nothing_is_started_before_the_provider_has_said_what_lives() -> None:
    bench = Bench()
    bench.feed(Tick(), after=1.0)
    bench.feed(Failed(bench.take(ListProviderWorkers).ticket, "not now"))
    bench.feed(Tick(), after=5.0)
    assert not bench.has(Reserve)
    bench.list_members()
    assert bench.has(Reserve)


def test_the_phases_of_a_start() -> None:
    bench = Bench()
    bench.list_members()
    phases = [bench.phase]
    bench.do(Reserve)
    phases.append(bench.phase)
    worker = bench.do(Launch).worker
    bench.report(worker, WorkerPhase.STARTING)
    phases.append(bench.phase)
    bench.report(worker)
    phases.append(bench.phase)
    assert phases == [
        PoolMemberPhase.RESERVING,
        PoolMemberPhase.LAUNCHING,
        PoolMemberPhase.LOADING,
        PoolMemberPhase.READY,
    ]


def test_what_was_asked_before_the_drain_was_accepted_is_no_evidence() -> None:
    """A session may have arrived between the store's answer and the drain."""
    bench = Bench()
    worker = bench.start()
    bench.list_workers(row(worker))
    bench.feed(Tick(), after=2.0)
    early = bench.take(ListWorkers)
    bench.feed(SizeWanted(0, "test"))
    bench.do(Drain)
    bench.feed(WorkersListed(early.ticket, (row(worker),)))
    assert not bench.has(Release)
    bench.list_workers(row(worker, WorkerPhase.DRAINING, sessions=1))
    assert not bench.has(Release)
    bench.list_workers(row(worker, WorkerPhase.DRAINING, suspended=1))
    assert not bench.has(Release)
    bench.list_workers(row(worker, WorkerPhase.DRAINING))
    bench.do(Release)
    assert bench.pool.members == {}
    assert bench.take(DeclareGone).worker == worker


def listed_just_now(bench: Bench, sessions: int) -> str:
    """Start a worker. The store, asked just now, says that it holds `sessions`."""
    worker = bench.start()
    bench.list_workers(row(worker))
    bench.feed(WorkersListed(bench.take(ListWorkers).ticket, (row(worker, sessions=sessions),)))
    assert not bench.has(ListWorkers)
    return worker


def test_the_store_is_asked_at_once_when_a_worker_reports_that_it_has_drained() -> None:
    """An empty worker was paid for until the next periodic question, one second on average."""
    bench = Bench()
    worker = listed_just_now(bench, sessions=1)
    bench.feed(SizeWanted(0, "test"), after=1.0)
    bench.do(Drain)
    bench.report(worker, WorkerPhase.DRAINING, sessions=1)
    assert not bench.has(ListWorkers)
    bench.report(worker, WorkerPhase.DRAINING)
    asked = bench.take(ListWorkers)
    # The report is no evidence: a session may be on its way to the worker.
    assert not bench.has(Release)
    bench.feed(WorkersListed(asked.ticket, (row(worker, WorkerPhase.DRAINING, sessions=1),)))
    assert not bench.has(Release)
    # Reports may come often. Each list has the whole pool.
    bench.report(worker, WorkerPhase.DRAINING)
    bench.report(worker, WorkerPhase.DRAINING)
    assert not bench.has(ListWorkers)
    bench.feed(Tick(), after=Policy.drained_list_s)
    bench.feed(WorkersListed(bench.take(ListWorkers).ticket, (row(worker, WorkerPhase.DRAINING),)))
    bench.do(Release)


def test_an_answer_that_was_on_its_way_when_a_worker_drained_is_followed_by_another() -> None:
    bench = Bench()
    worker = listed_just_now(bench, sessions=1)
    bench.feed(SizeWanted(0, "test"))
    bench.do(Drain)
    bench.feed(Tick(), after=2.0)
    early = bench.take(ListWorkers)
    bench.report(worker, WorkerPhase.DRAINING)
    assert not bench.has(ListWorkers)
    draining = row(worker, WorkerPhase.DRAINING, sessions=1)
    bench.feed(WorkersListed(early.ticket, (draining,)), after=Policy.drained_list_s)
    assert not bench.has(Release)
    bench.feed(WorkersListed(bench.take(ListWorkers).ticket, (row(worker, WorkerPhase.DRAINING),)))
    bench.do(Release)


def test_an_empty_worker_is_released_when_its_drain_is_accepted() -> None:
    bench = Bench()
    worker = listed_just_now(bench, sessions=0)
    bench.feed(SizeWanted(0, "test"), after=1.0)
    assert not bench.has(ListWorkers)
    bench.do(Drain)
    bench.feed(WorkersListed(bench.take(ListWorkers).ticket, (row(worker, WorkerPhase.DRAINING),)))
    bench.do(Release)


def test_a_drain_that_is_refused_asks_the_store_nothing() -> None:
    bench = Bench()
    listed_just_now(bench, sessions=0)
    bench.feed(SizeWanted(0, "test"), after=1.0)
    bench.feed(Failed(bench.take(Drain).ticket, "no state store"))
    assert not bench.has(ListWorkers)


def test_a_drain_is_repeated_where_the_worker_was_started_again_under_its_id() -> None:
    """The drain ended with the process.

    The next process accepts sessions, and the pool would wait for ever.
    """
    bench = Bench()
    worker = bench.start()
    bench.list_workers(row(worker))
    bench.feed(SizeWanted(0, "test"))
    bench.do(Drain)
    # Requested before the drain was accepted: no evidence.
    bench.list_workers(row(worker))
    assert not bench.has(Drain)
    bench.list_workers(row(worker))
    assert not bench.has(Release)
    bench.feed(Tick(), after=2.0)
    assert bench.do(Drain).worker == worker
    for _ in range(2):
        bench.list_workers(row(worker, WorkerPhase.DRAINING))
    bench.do(Release)


def test_a_drain_that_fails_is_repeated() -> None:
    bench = Bench()
    bench.start()
    bench.feed(SizeWanted(0, "test"))
    bench.feed(Failed(bench.take(Drain).ticket, "no answer"))
    bench.feed(Tick(), after=0.5)
    assert not bench.has(Drain)
    bench.feed(Tick(), after=1.0)
    bench.do(Drain)
    assert bench.phase is PoolMemberPhase.DRAINING


def test_an_adopted_worker_that_drains_is_not_late() -> None:
    bench = Bench(policy=Policy(ready_timeout_s=20.0))
    bench.list_members(RunningWorker("local-0", "wrk_old", 7))
    bench.feed(Tick(), after=100.0)
    bench.list_workers(row("wrk_old", WorkerPhase.DRAINING, sessions=2))
    assert not bench.has(Release)
    assert bench.pool.members["local-0"].phase is PoolMemberPhase.DRAINING
    # Another pool member fills the place.
    assert bench.take(Reserve).member == "local-1"


def test_no_worker_drains_in_the_place_of_one_that_drained_before() -> None:
    """The pool begins with the workers that do not drain. The others' reports may come first."""
    bench = Bench()
    bench.pool.leaving = frozenset({"wrk_0"})
    bench.feed(SizeWanted(2, "2 already running"))
    bench.list_members(*(RunningWorker(f"local-{number}", f"wrk_{number}", number) for number in range(3)))
    for worker in ("wrk_2", "wrk_1"):
        bench.report(worker)
    assert not bench.has(Drain)
    bench.report("wrk_0", WorkerPhase.DRAINING)
    assert bench.take(Drain).worker == "wrk_0"
    assert not bench.has(Drain)
    assert not bench.has(Reserve)


def test_a_registered_worker_that_is_late_is_drained_before_its_end() -> None:
    """Incident: it was released, the provider failed, it became ready meanwhile, and ended with a session."""
    bench = Bench(policy=Policy(ready_timeout_s=20.0))
    bench.list_members()
    bench.do(Reserve)
    worker = bench.do(Launch).worker
    bench.feed(Tick(), after=25.0)
    bench.feed(Failed(bench.take(ListWorkers).ticket, "no answer"))
    bench.list_workers(row(worker, WorkerPhase.STARTING))
    assert not bench.has(Release)
    # It becomes ready and gets a session before the store has accepted the drain.
    bench.report(worker)
    assert bench.do(Drain).worker == worker
    bench.list_workers(row(worker))
    bench.list_workers(row(worker, WorkerPhase.DRAINING, sessions=1))
    assert not bench.has(Release)
    bench.list_workers(row(worker, WorkerPhase.DRAINING))
    released = bench.do(Release)
    assert (released.worker, released.reason) == (worker, "not ready within 20 s")
    member = bench.pool.members["local-0"]
    assert (member.wanted, member.failures) == (True, 1)
    bench.feed(Tick())
    bench.do(Reserve)
    assert bench.take(Launch).worker != worker


def test_a_worker_that_registers_after_its_release_has_failed_is_drained_first() -> None:
    for by_report in (True, False):
        bench = Bench(policy=Policy(ready_timeout_s=20.0))
        bench.list_members()
        bench.do(Reserve)
        worker = bench.do(Launch).worker
        bench.feed(Tick(), after=25.0)
        bench.feed(Failed(bench.take(ListWorkers).ticket, "no answer"))
        bench.list_workers()
        release = bench.take(Release)
        # While the release is under way, it decides.
        bench.report(worker)
        assert not bench.has(Drain)
        bench.feed(Failed(release.ticket, "the provider failed"))
        bench.feed(Tick(), after=5.0)
        assert not bench.has(Release), "the store has not been asked yet"
        if by_report:
            bench.report(worker)
        else:
            bench.list_workers(row(worker, sessions=1))
        assert bench.do(Drain).worker == worker
        bench.list_workers(row(worker, WorkerPhase.DRAINING, sessions=1))
        assert not bench.has(Release)
        bench.list_workers(row(worker, WorkerPhase.DRAINING))
        assert bench.do(Release).reason == "not ready within 20 s"
        assert bench.pool.members["local-0"].failures == 1


def test_the_release_of_a_worker_that_never_registers_is_repeated() -> None:
    bench = Bench(policy=Policy(ready_timeout_s=20.0))
    bench.list_members()
    bench.do(Reserve)
    bench.do(Launch)
    bench.feed(Tick(), after=25.0)
    bench.feed(Failed(bench.take(ListWorkers).ticket, "no answer"))
    bench.list_workers()
    for _ in range(3):
        bench.feed(Failed(bench.take(Release).ticket, "the provider failed"))
        bench.list_workers()
        bench.list_workers()
    bench.do(Release)


def test_an_adopted_worker_is_not_late_while_the_store_is_silent() -> None:
    bench = Bench(policy=Policy(ready_timeout_s=20.0))
    bench.list_members(RunningWorker("local-0", "wrk_old", 7))
    for _ in range(100):
        bench.feed(Tick(), after=2.0)
        bench.feed(Failed(bench.take(ListWorkers).ticket, "no answer"))
    assert not bench.has(Release)
    bench.list_workers(row("wrk_old", sessions=2))
    assert bench.phase is PoolMemberPhase.READY


def test_a_listing_older_than_a_death_does_not_bring_back_the_dead() -> None:
    bench = Bench()
    worker = bench.start()
    bench.feed(Tick(), after=2.0)
    bench.feed(Exited(worker, "killed"))
    bench.list_members(RunningWorker("local-0", worker, 42))
    assert [member.name for member in bench.pool.members.values()] == ["local-0"]
    assert bench.take(Launch).worker != worker


def test_what_lives_although_it_was_taken_for_dead_is_ended() -> None:
    bench = Bench()
    worker = bench.start()
    bench.feed(Exited(worker, "killed"))
    bench.do(DeclareGone)
    bench.feed(Tick(), after=2.0)
    bench.list_members(RunningWorker("local-0", worker, 42))
    extra = bench.pool.members[f"local-extra-{worker}"]
    bench.report(worker)
    bench.feed(Failed(bench.take(Drain).ticket, "gone", missing=True))
    assert extra.phase is PoolMemberPhase.RELEASING
    assert bench.take(Release).worker == worker


def test_a_worker_that_the_store_has_given_up_is_ended_and_replaced() -> None:
    """A stopped process keeps its place although it no longer reports."""
    bench = Bench()
    worker = bench.start()
    bench.list_workers(row(worker, sessions=1))
    bench.list_workers()
    refused = bench.take(Release)
    assert (refused.worker, refused.declared_gone) == (worker, True)
    bench.feed(Failed(refused.ticket, "it does not end"))
    bench.feed(Tick(), after=2.0)
    assert bench.do(Release).declared_gone
    bench.feed(Tick())
    assert bench.do(Reserve).member == "local-0"
    assert bench.do(Launch).worker != worker
    bench.feed(SizeWanted(0, "test"))
    member = bench.pool.members["local-0"]
    assert not member.declared_gone


def test_failures_are_forgotten_after_a_stable_time() -> None:
    bench = Bench()
    for expected in (1, 2, 3):
        if expected == 1:
            worker = bench.start()
        else:
            bench.feed(Tick(), after=30.0)
            worker = bench.do(Launch).worker
            bench.report(worker)
        bench.feed(Exited(worker, "crashed"))
        assert bench.pool.members["local-0"].failures == expected
    bench.feed(Tick(), after=30.0)
    worker = bench.do(Launch).worker
    bench.report(worker)
    bench.feed(Tick(), after=31.0)
    bench.feed(Exited(worker, "crashed"))
    assert bench.pool.members["local-0"].failures == 1
    assert bench.has(Launch), "the first failure costs no wait"


def test_a_launch_of_unknown_outcome_is_settled_by_what_lives() -> None:
    bench = Bench()
    bench.list_members()
    bench.do(Reserve)
    launch = bench.take(Launch)
    bench.feed(Failed(launch.ticket, "no answer"))
    bench.feed(Tick(), after=2.0)
    bench.list_members(RunningWorker("local-0", launch.worker, 42))
    bench.report(launch.worker)
    assert bench.phase is PoolMemberPhase.READY
    assert not bench.has(Release)


def test_a_launch_that_started_nothing_is_tried_again() -> None:
    bench = Bench()
    bench.list_members()
    bench.do(Reserve)
    launch = bench.take(Launch)
    bench.feed(Failed(launch.ticket, "no such program", missing=True))
    again = bench.take(Launch)
    assert again.worker != launch.worker


def test_the_store_gets_the_report_until_it_acknowledges_it() -> None:
    bench = Bench()
    worker = bench.start()
    bench.feed(Exited(worker, "the process ended with status 1"))
    for _ in range(3):
        notice = bench.take(DeclareGone)
        assert (notice.worker, notice.reason) == (worker, "the process ended with status 1")
        bench.feed(Failed(notice.ticket, "no answer"))
        bench.feed(Tick(), after=1.0)
    bench.do(DeclareGone)
    bench.feed(Tick(), after=10.0)
    assert not bench.has(DeclareGone)


def test_answers_that_come_twice_or_too_late_change_nothing() -> None:
    bench = Bench()
    worker = bench.start()
    before = bench.phase
    for ticket in range(1, 20):
        bench.feed(Done(ticket))
        bench.feed(Failed(ticket, "late"))
    bench.feed(ProviderWorkersListed(3, ()))
    assert bench.phase is before
    assert bench.pool.members["local-0"].worker == worker


def test_shrinking_gives_up_what_is_missed_least() -> None:
    bench = Bench(size=3)
    bench.list_members()
    for _ in range(3):
        bench.do(Reserve)
    workers = [bench.do(Launch).worker for _ in range(3)]
    for worker in workers:
        bench.report(worker)
    bench.list_workers(row(workers[0], sessions=2), row(workers[1]), row(workers[2], sessions=1))
    bench.feed(SizeWanted(2, "test"))
    assert bench.do(Drain).worker == workers[1]
    bench.feed(SizeWanted(1, "test"))
    assert bench.do(Drain).worker == workers[2]
