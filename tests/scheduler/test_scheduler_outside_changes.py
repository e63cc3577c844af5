"""Which changes let a session return to a worker that it left: those that the rebalancer did not cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

OF_A: dict[str, object] = {"worker": "a", "model": "m", "capacity": 4, "transfer": ADDRESS}
OF_B = {**OF_A, "worker": "b"}
NO_PROFILE: Mapping[int, float] = {}


def migrated(
    kind: MigrationKind = MigrationKind.BALANCE, plays: bool = True, profile: Mapping[int, float] = NO_PROFILE
) -> Bench:
    """Return a bench whose session `s` the rebalancer has migrated from `a` to `b`.

    `a` has reported whether its viewer plays, and `profile`.
    """
    bench = Bench(worker("a"), worker("b"), session(), session("other", "a"))
    report(bench)
    bench.feed(LoadReported(LoadReport.model_validate({**OF_A, "sessions": (held("s", 1, plays),)})))
    report(bench, chunk_latency_s=profile)
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
    values = {**OF_A, "sessions": (held("other", 1, playing, control_seq),)}
    bench.feed(LoadReported(LoadReport.model_validate({**values, **more})))


def held(name: str, epoch: int, playing: bool, control_seq: int = 0) -> HeldSession:
    slack = SessionSlack(slack_s=1.0, credit_s=0.5, tier=Tier.NORMAL, playing=playing)
    return HeldSession(session=name, epoch=epoch, next_chunk=1, control_seq=control_seq, slack=slack)


def owner_reports(bench: Bench, *plays: bool, control_seq: int = 0) -> None:
    """The new owner `b` of `s` reports, one time after the other, whether the viewer plays."""
    epoch = bench.rows["s"].epoch
    for playing in plays:
        sessions = (held("s", epoch, playing, control_seq),)
        bench.feed(LoadReported(LoadReport.model_validate({**OF_B, "sessions": sessions})))


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


def test_a_new_owner_that_learns_that_the_viewer_plays_is_no_change() -> None:
    bench = migrated()
    owner_reports(bench, False, False, True, True)
    assert barred(bench) == {"a"}
    # Now the owner knows.
    owner_reports(bench, False)
    assert barred(bench) == set()


def test_a_viewer_who_starts_to_play_on_a_new_owner_is_a_change() -> None:
    bench = migrated(plays=False)
    owner_reports(bench, False)
    assert barred(bench) == {"a"}
    owner_reports(bench, True)
    assert barred(bench) == set()


def test_an_input_to_a_new_owner_is_a_change() -> None:
    bench = migrated()
    owner_reports(bench, False, control_seq=1)
    assert barred(bench) == set()


@pytest.mark.parametrize(
    ("profile", "bar"),
    [
        ({1: 0.5, 4: 2.0}, {"a"}),
        ({1: 0.52, 2: 1.05, 4: 1.9}, {"a"}),
        ({1: 0.5, 2: 1.4, 4: 2.0}, set()),
        ({1: 0.5, 3: 1.5, 4: 2.3}, set()),
    ],
)
def test_a_batch_size_measured_for_the_first_time_is_a_change_only_off_the_curve(
    profile: dict[int, float], bar: set[str]
) -> None:
    bench = migrated(profile={1: 0.5, 4: 2.0})
    report(bench, chunk_latency_s=profile)
    assert barred(bench) == bar
    # The profile in use is the reported one in any case.
    assert bench.core.view.workers["a"].chunk_latency_s == profile


def test_small_steps_add_up_to_a_change() -> None:
    bench = migrated(profile={1: 0.5, 8: 4.0})
    report(bench, chunk_latency_s={1: 0.54, 4: 2.1, 8: 4.0})
    assert barred(bench) == {"a"}
    report(bench, chunk_latency_s={1: 0.58, 2: 1.1, 4: 2.1, 8: 4.0})
    assert barred(bench) == set()
