"""Loans between workers in the scheduler's view: a donor keeps its slots, and is chosen last among equals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.scheduler.drawn_clusters import EXAMPLES, begin, changed, changes, demands, finish
from tests.scheduler.test_scheduler_absorption import Bench
from turboserve.contracts.loans import LoanRole, WorkerLoan
from turboserve.scheduler.placement import Cluster, Demand, MigrationKind, MinMax, MinMaxRebalancer
from turboserve.scheduler.placement.pool import LENT_SHARE, LatencyCurve, PoolEntry, with_loan_s
from turboserve.scheduler.placement.types import WorkerState


def loan(role: LoanRole, peer: str) -> WorkerLoan:
    return WorkerLoan(role=role, peer=peer)


def without_loans(deltas: list[tuple[str, object]]) -> Cluster:
    """The same cluster, in which no worker lends."""
    return changed(
        [
            (name, replace(given, lends=False) if isinstance(given, WorkerState) else given)
            for name, given in deltas
        ]
    )


def test_a_donor_is_the_last_among_equal_workers_and_keeps_its_slots() -> None:
    bench = Bench("a", "b")
    bench.report("a", loan=loan(LoanRole.DONOR, "b"))
    bench.create(1)
    assert bench.loads() == [0, 1]
    # Half of a lone chunk is less than a session more.
    bench.create(1)
    assert bench.loads() == [1, 1]
    bench.create(3)
    assert bench.loads() == [2, 2]
    assert [decision.kind for decision in bench.decisions] == ["place"] * 4 + ["wait"]


@pytest.mark.parametrize("found", [None, loan(LoanRole.HOME, "b")])
def test_a_worker_that_has_ended_its_loan_or_borrows_is_chosen_as_without_loans(
    found: WorkerLoan | None,
) -> None:
    bench = Bench("a", "b")
    bench.report("a", loan=loan(LoanRole.DONOR, "b"))
    bench.report("a", loan=found)
    bench.create(1)
    assert bench.loads() == [1, 0]


def test_load_feedback_counts_the_workers_that_borrow_and_keeps_all_capacity() -> None:
    bench = Bench("a", "b", "c")
    bench.create(3)
    bench.pass_time(1.5)
    before = bench.feedback[-1]
    bench.report("a", loan=loan(LoanRole.HOME, "b"))
    bench.report("b", loan=loan(LoanRole.DONOR, "a"))
    bench.pass_time(1.5)
    told = bench.feedback[-1]
    assert (before.borrowing, told.borrowing) == (0, 1)
    assert told.model_copy(update={"borrowing": 0, "at": before.at}) == before


def test_what_a_donor_lends_counts_where_it_is_a_target_and_nowhere_else() -> None:
    curve = LatencyCurve({1: 0.2, 2: 0.3}, 4)
    assert with_loan_s(curve, 2, lends=False) == curve(2)
    assert with_loan_s(curve, 2, lends=True) == pytest.approx(0.3 + LENT_SHARE * 0.2)
    found = []
    for lends in (False, True):
        state = WorkerState("a", "m", 4, chunk_latency_s={1: 0.2, 2: 0.3}, lends=lends)
        entry = PoolEntry("a")
        entry.become(state, None)
        found.append((entry.slots, entry.limit, entry.curve(2)))
    assert found[0] == found[1]


@given(changes(), demands())
@settings(max_examples=EXAMPLES, deadline=None)
def test_no_session_waits_because_of_a_loan(deltas: list[tuple[str, object]], wanted: list[Demand]) -> None:
    with_loans, plain = changed(deltas), without_loans(deltas)
    places = [MinMax().assign(cluster, wanted) for cluster in (with_loans, plain)]
    counts = [sum(choice.worker is not None for choice in choices) for choices in places]
    # Which of several workers an earlier demand takes then decides nothing for a later one.
    if not any(one.excluded or one.holder or one.weights_digest for one in wanted):
        assert counts[0] == counts[1]
    if not any(worker.lends for worker in with_loans.workers.values()):
        assert places[0] == places[1]


@given(changes())
@settings(max_examples=EXAMPLES, deadline=None)
def test_no_drain_ends_earlier_because_of_a_loan(deltas: list[tuple[str, object]]) -> None:
    """Where sessions may go to any worker, as many leave draining workers at once as without loans."""
    counts = []
    for cluster in (changed(deltas), without_loans(deltas)):
        if any(session.excluded for session in cluster.sessions.values()):
            return
        found = MinMaxRebalancer().propose(cluster, 0.0)
        drains = [one for one in found if one.kind is MigrationKind.DRAIN]
        for one in drains:
            begin(cluster, one)
            finish(cluster, one)
        counts.append(len(drains))
    assert counts[0] == counts[1]
