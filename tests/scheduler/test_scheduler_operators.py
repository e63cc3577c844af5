"""Operator requests: a migration of a session, and the reason of a refusal."""

from __future__ import annotations

import pytest

from tests.scheduler.migrations_bench import Bench, session, worker
from turboserve.baselines.least_loaded import LeastLoaded
from turboserve.contracts import errors
from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import WorkerPhase
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import (
    Answered,
    BeginMigration,
    MigrationRequested,
    RecordDecision,
    Refused,
    Reply,
)


def test_an_operator_migrates_a_session_where_he_likes() -> None:
    bench = Bench(worker("a"), worker("b"), worker("c"), session("s"), session("t", "b"))
    bench.feed(MigrationRequested(5, "s", "b"))
    begin = bench.take(BeginMigration)
    assert (begin.worker, "operator" in begin.decision.reason) == ("b", True)
    assert bench.none(Reply)
    bench.feed(Answered(begin.ticket, bench.do(begin)))
    reply = bench.take(Reply)
    assert (reply.request, reply.error, reply.decision) == (5, None, begin.decision)
    assert reply.record is not None
    assert reply.record.target == "b"
    # Without a target, the session goes to another worker where the load grows least.
    bench.feed(MigrationRequested(6, "t"))
    assert bench.take(BeginMigration).worker == "c"


@pytest.mark.parametrize(
    ("name", "to", "error"),
    [
        ("never", "b", errors.SessionNotFoundError),
        ("s", "never", errors.NotFoundError),
        ("s", "a", errors.InvalidInputError),
        ("s", "other", errors.InvalidInputError),
        ("s", "full", errors.NoCapacityError),
        ("s", "draining", errors.NoCapacityError),
        ("waits", "b", errors.TransitionError),
        ("migrations", "b", errors.TransitionError),
        ("huge", None, errors.NoCapacityError),
    ],
)
def test_what_an_operator_cannot_have_is_said_at_once(
    name: str, to: str | None, error: type[errors.TurboServeError]
) -> None:
    bench = Bench(
        worker("a"),
        worker("b", capacity=2),
        worker("full", capacity=1),
        worker("draining", phase=WorkerPhase.DRAINING),
        worker("other").model_copy(update={"model": "n"}),
        session("s"),
        session("f", "full"),
        session("waits", None, phase=Phase.REQUESTED, epoch=0, model="nobody-serves-it"),
        session("migrations", phase=Phase.MIGRATING, target="b", migration=2),
        session("huge", "other", model="n"),
    )
    bench.feed(MigrationRequested(1, name, to))
    reply = bench.take(Reply)
    assert type(reply.error) is error
    assert bench.none(BeginMigration)
    notes = [
        one.decision for one in bench.out if isinstance(one, RecordDecision) and one.decision.kind == "stay"
    ]
    assert len(notes) == (error is errors.NoCapacityError)
    for said in notes:
        assert (said.session, said.worker) == (name, bench.rows[name].worker)
        assert said.reason == f"an operator requested its migration: {reply.error.detail}"


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (Refused.CONFLICT, errors.ConflictError),
        (Refused.NO_CAPACITY, errors.NoCapacityError),
        (Refused.WORKER_GONE, errors.NotFoundError),
        (Refused.NOT_FOUND, errors.SessionNotFoundError),
        (Refused.NOT_SENT, errors.UnavailableError),
        (Refused.UNKNOWN, errors.DeadlineError),
    ],
)
def test_what_the_store_refuses_an_operator_is_said(
    refused: Refused, error: type[errors.TurboServeError]
) -> None:
    bench = Bench(worker("a"), worker("b"), session())
    bench.feed(MigrationRequested(1, "s", "b"))
    bench.feed(Answered(bench.take(BeginMigration).ticket, refused=refused))
    assert type(bench.take(Reply).error) is error
    noted = ["stay"] * (refused is Refused.NO_CAPACITY)
    assert [one.decision.kind for one in bench.out if isinstance(one, RecordDecision)] == noted
    # Nothing stays reserved once the row is known.
    if refused in (Refused.NO_CAPACITY, Refused.NOT_SENT):
        assert bench.core.view.workers["b"].load == 0
    assert not bench.core.view.beginning or refused in (Refused.CONFLICT, Refused.UNKNOWN)


def test_before_the_view_is_filled_operators_must_retry() -> None:
    core = Scheduler(LeastLoaded())
    first, second = (
        one.error
        for _ in range(2)
        for one in core.handle(MigrationRequested(1, "s"), 0.0)
        if isinstance(one, Reply)
    )
    assert isinstance(first, errors.UnavailableError)
    # An error that is raised again keeps its earlier tracebacks.
    assert first is not second
