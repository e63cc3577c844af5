"""Which changes let a session return to a worker that it left: those that the rebalancer did not cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scheduler.migrations_bench import ADDRESS, Bench, session, worker
from turboserve.contracts.fidelity import SessionSlack, Tier
from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import HeldSession, LoadReport, WorkerPhase
from turboserve.scheduler.messages import (
    Answered,
    BeginMigration,
    CommitMigration,
    LoadReported,
    SessionChanged,
    WorkerChanged,
)
from turboserve.scheduler.placement import MigrationKind
from turboserve.scheduler.placement.links import Links
from turboserve.scheduler.placement.plan import Planner


def migrated(kind: MigrationKind = MigrationKind.BALANCE) -> Bench:
    """Return a bench whose session `s` the rebalancer has migrated from `a` to `b`."""
    bench = Bench(worker("a"), worker("b"), session(), session("other", "a"))
    report(bench)
    bench.wishes.wish("s", "b", kind)
    bench.pass_time(1.0)
    begin = bench.take(BeginMigration)
    bench.feed(Answered(begin.ticket, bench.do(begin)))
    bench.verified()
    bench.store(CommitMigration)
    assert bench.rows["s"].worker == "b"
    return bench


def report(bench: Bench, control_seq: int = 0, playing: bool = True, **more: object) -> None:
    """Worker `a` reports its session `other`."""
    slack = SessionSlack(slack_s=1.0, credit_s=0.5, tier=Tier.NORMAL, playing=playing)
    held = HeldSession(session="other", epoch=1, next_chunk=1, control_seq=control_seq, slack=slack)
    values = {"worker": "a", "model": "m", "capacity": 4, "transfer": ADDRESS, "sessions": (held,)}
    bench.feed(LoadReported(LoadReport.model_validate({**values, **more})))


def barred(bench: Bench) -> set[str]:
    """Return the workers to which `s` may not migrate while slack is used."""
    cluster = bench.core.projection.cluster(bench.now, bench.core.listening.now)
    planner = Planner(cluster, cluster.pool("m"), Links(), bench.now, returns=False)
    return set(planner.barred(cluster.sessions["s"]))


def test_a_session_does_not_return_while_nothing_changes() -> None:
    bench = migrated()
    assert barred(bench) == {"a"}
    for _ in range(3):
        report(bench)
        bench.pass_time(40.0)
    assert barred(bench) == {"a"}


def test_another_migration_of_the_rebalancer_is_no_change_from_outside() -> None:
    bench = migrated()
    bench.wishes.wish("other", "b")
    bench.pass_time(1.0)
    begin = bench.take(BeginMigration)
    bench.feed(Answered(begin.ticket, bench.do(begin)))
    bench.verified("other")
    bench.store(CommitMigration)
    assert barred(bench) == {"a"}


def arrives(bench: Bench) -> None:
    bench.feed(SessionChanged(session("new", "b")))


def ends(bench: Bench) -> None:
    bench.feed(SessionChanged(bench.change("other", phase=Phase.TERMINATED, worker=None)))


def is_suspended(bench: Bench) -> None:
    bench.feed(SessionChanged(bench.change("other", phase=Phase.SUSPENDED)))


def drains(bench: Bench) -> None:
    bench.feed(WorkerChanged(worker("a", phase=WorkerPhase.DRAINING)))


def grows(bench: Bench) -> None:
    report(bench, capacity=6)


def slows(bench: Bench) -> None:
    report(bench, chunk_latency_s={1: 0.5})


def prompts(bench: Bench) -> None:
    report(bench, control_seq=1)


def stops_playing(bench: Bench) -> None:
    report(bench, playing=False)


@pytest.mark.parametrize(
    "change", [arrives, ends, is_suspended, drains, grows, slows, prompts, stops_playing]
)
def test_a_session_may_return_after_a_change_at_either_end(change: Callable[[Bench], None]) -> None:
    bench = migrated()
    change(bench)
    assert barred(bench) == set()


def test_only_the_rebalancers_own_migrations_bar_a_worker() -> None:
    assert barred(migrated(MigrationKind.DRAIN)) == set()
    # A new leader does not know who began the migration that it finds.
    bench = Bench(worker("a"), worker("b"), session(phase=Phase.MIGRATING, target="b", migration=2))
    bench.verified()
    bench.store(CommitMigration)
    assert barred(bench) == set()
