"""The pool's core against a model of provider, processes and store (`pool_world`), under faults."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.autoscaler.pool_world import MANY, NONE, Faults, World, run_scenario, settle
from turboserve.autoscaler.status import pool_status
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.workers import WorkerPhase, WorkerRecord


@pytest.mark.parametrize("seed", range(25))
def test_under_faults_no_session_is_harmed_and_afterwards_the_pool_is_whole(seed: int) -> None:
    settle(run_scenario(seed, MANY))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    faults=st.builds(
        Faults,
        store_down=st.sampled_from((0.0, 0.1)),
        provider_fails=st.sampled_from((0.0, 0.3)),
        lost_answer=st.sampled_from((0.0, 0.3)),
        crash=st.sampled_from((0.0, 0.05)),
        crash_at_start=st.sampled_from((0.0, 0.5)),
        never_ready=st.sampled_from((0.0, 0.3)),
        lost_exit=st.sampled_from((0.0, 1.0)),
        lost_load=st.sampled_from((0.0, 1.0)),
        restart=st.sampled_from((0.0, 0.1)),
        declared_gone=st.sampled_from((0.0, 0.03)),
    ),
)
def test_any_mixture_of_faults(seed: int, faults: Faults) -> None:
    settle(run_scenario(seed, faults, seconds=60))


def test_the_same_seed_gives_the_same_decisions() -> None:
    assert run_scenario(3, MANY).trace == run_scenario(3, MANY).trace
    assert run_scenario(3, MANY).trace != run_scenario(4, MANY).trace


def test_a_calm_pool_does_nothing() -> None:
    world = World(1, NONE, size=3)
    world.run(600)
    assert world.launches == 3
    assert world.releases == []


def test_a_worker_that_crashes_at_every_start_is_tried_ever_less_often() -> None:
    world = World(1, Faults(crash_at_start=1.0), size=1)
    world.run(60)
    first = world.launches
    world.run(300)
    assert 5 <= first <= 10
    assert world.launches - first <= 300 / world.policy.backoff_limit_s + 1
    [member] = pool_status(world.pool, "model", True, world.now, 1e9).members
    assert member.failures > 5
    assert member.retry_in_s is None or member.retry_in_s <= world.policy.backoff_limit_s


def test_a_worker_that_never_becomes_ready_is_replaced() -> None:
    world = World(1, Faults(never_ready=1.0), size=1)
    world.run(19)
    assert world.launches == 1
    world.run(6)
    assert world.launches == 2
    assert [reason for _, reason in world.releases] == ["not ready within 20 s"]
    world.calm()
    world.run(40)
    assert world.phases() == [PoolMemberPhase.READY]


def test_a_stable_worker_that_dies_is_replaced_at_once() -> None:
    world = World(1, NONE, size=1)
    world.run(60)
    [process] = world.ready()
    world.end(process.worker, told=True)
    world.run(1.0)
    assert world.launches == 2
    assert world.rows[process.worker].phase is WorkerPhase.GONE


def test_no_metrics_at_all_never_shrink_the_pool() -> None:
    world = World(1, NONE, size=3)
    world.run(30)
    world.store_up = False
    world.faults = Faults(lost_load=1.0)
    world.run(3600)
    assert len(world.ready()) == 3
    assert world.releases == []


def test_a_drain_waits_for_the_last_session_and_reports_that_it_takes_long() -> None:
    world = World(1, NONE, size=2)
    world.run(15)
    workers = [process.worker for process in world.ready()]
    busy = dict.fromkeys(workers, (1, 1))
    world.serve_sessions = lambda worker, phase: world.held.update(busy)  # type: ignore[method-assign]
    world.run(5)
    world.resize(1)
    world.run(100)
    assert len(world.ready()) == 2
    assert [action.action for action in world.pool.actions].count("extend") >= 3
    [draining] = [s for s in world.pool.members.values() if s.phase is PoolMemberPhase.DRAINING]
    doomed = draining.worker
    assert doomed is not None
    busy[doomed] = (0, 1)
    world.run(10)
    assert len(world.ready()) == 2
    busy[doomed] = (0, 0)
    world.run(10)
    assert [p.worker for p in world.ready()] == [w for w in workers if w != doomed]
    assert world.phases() == [PoolMemberPhase.READY]


def test_a_drain_cannot_be_taken_back_so_another_worker_comes() -> None:
    world = World(1, NONE, size=1)
    world.run(15)
    [first] = world.ready()
    world.serve_sessions = lambda worker, phase: world.held.update({first.worker: (1, 0)})  # type: ignore[method-assign]
    world.run(2)
    world.resize(0)
    world.run(5)
    world.resize(1)
    world.run(15)
    assert len(world.ready()) == 2
    assert sorted(world.phases()) == sorted([PoolMemberPhase.DRAINING, PoolMemberPhase.READY])


def test_an_autoscaler_that_was_killed_adopts_and_starts_no_doubles() -> None:
    world = World(1, NONE, size=3)
    world.run(30)
    before = {process.worker for process in world.ready()}
    world.restart()
    world.run(30)
    assert {process.worker for process in world.ready()} == before
    assert world.launches == 3


def test_killed_in_the_middle_of_a_launch_it_finds_what_was_started() -> None:
    world = World(1, NONE, size=1)
    while not world.processes:
        world.run(0.01)
    world.restart()
    world.run(30)
    assert world.launches == 1
    assert world.phases() == [PoolMemberPhase.READY]


def test_a_row_without_a_process_is_declared_gone() -> None:
    """The state after a restart of the machine."""
    world = World(1, NONE, size=1)
    world.rows["wrk_old"] = WorkerRecord(
        id="wrk_old",
        model="m",
        phase=WorkerPhase.READY,
        capacity=4,
        pool_member="local-0",
        started_at=1,
        renewed_at=1,
    )
    world.rows["wrk_other"] = WorkerRecord(
        id="wrk_other",
        model="m",
        phase=WorkerPhase.READY,
        capacity=4,
        pool_member="ray-0",
        started_at=1,
        renewed_at=1,
    )
    world.run(20)
    assert world.rows["wrk_old"].phase is WorkerPhase.GONE
    assert world.rows["wrk_other"].phase is WorkerPhase.READY


def test_a_size_out_of_range_changes_nothing() -> None:
    world = World(1, NONE, size=1)
    world.run(10)
    with pytest.raises(ValueError, match="size: -1"):
        world.resize(-1)
    world.run(10)
    assert world.phases() == [PoolMemberPhase.READY]
