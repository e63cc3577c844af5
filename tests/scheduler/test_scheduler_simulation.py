"""The scheduler's core against a model of its surroundings (`scheduler_world`), under faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.scheduler_faults import MANY, NONE, Faults
from tests.scheduler.scheduler_rows import OPEN
from tests.scheduler.scheduler_world import World, run_scenario
from turboserve.contracts.sessions import Activity, Phase
from turboserve.contracts.workers import WorkerPhase
from turboserve.scheduler.messages import ViewersReported
from turboserve.scheduler.policy import Policy


@pytest.fixture(autouse=True)
def closed_worlds() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().store.close()


def drawn(count: int, soak: int) -> pytest.MarkDecorator:
    """Return the parameter `seed`: `count` of them, and `soak` in `make soak`."""
    more = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(count, soak)]
    return pytest.mark.parametrize("seed", [*range(count), *more])


@drawn(1, soak=40)
def test_under_faults_nothing_is_overfilled_and_afterwards_everything_runs(seed: int) -> None:
    world = run_scenario(seed, MANY)
    world.calm()
    world.run(120)
    assert world.placements > 0
    assert not world.unserved() or world.free() == 0, f"{world.unserved()} wait, {world.free()} slots free"
    assert world.slow_migrations() == {}


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    faults=st.builds(
        Faults,
        delay_s=st.sampled_from((0.001, 0.05, 1.0)),
        lost_answer=st.sampled_from((0.0, 0.3)),
        lost_command=st.sampled_from((0.0, 0.3)),
        lost_load=st.sampled_from((0.0, 0.5, 1.0)),
        lost_event=st.sampled_from((0.0, 0.5, 1.0)),
        doubled_event=st.sampled_from((0.0, 0.5)),
        store_down=st.sampled_from((0.0, 0.05)),
        death=st.sampled_from((0.0, 0.05)),
        silence=st.sampled_from((0.0, 0.05)),
        restart=st.sampled_from((0.0, 0.05)),
        pause=st.sampled_from((0.0, 0.05)),
        refusal=st.sampled_from((0.0, 0.1)),
        drain=st.sampled_from((0.0, 0.05)),
        failed_copy=st.sampled_from((0.0, 0.5)),
        slow_copy=st.sampled_from((0.0, 0.5)),
        stale_copy=st.sampled_from((0.0, 0.5)),
    ),
)
def test_any_mixture_of_faults(seed: int, faults: Faults) -> None:
    world = run_scenario(seed, faults, seconds=30)
    world.calm()
    world.run(120)
    assert not world.unserved() or world.free() == 0
    assert world.slow_migrations() == {}


@drawn(1, soak=5)
def test_without_faults_the_store_never_has_to_refuse(seed: int) -> None:
    """Reservations alone keep a burst from overfilling a worker, so the store's own check is never needed."""
    world = run_scenario(seed, NONE)
    world.run(5)
    assert world.no_capacity == 0
    assert not world.unserved() or world.free() == 0


def test_the_same_seed_gives_the_same_decisions() -> None:
    first, second, other = (run_scenario(seed, MANY).trace for seed in (7, 7, 8))
    assert first == second
    assert first != other


@drawn(1, soak=10)
def test_when_nothing_changes_sessions_come_to_rest(seed: int) -> None:
    world = run_scenario(seed, MANY)
    world.calm()
    world.run(240)
    begun = len(world.migrated)
    world.run(240)
    assert len(world.migrated) == begun
    assert world.migrating_since == {}


@drawn(1, soak=5)
def test_a_draining_worker_is_emptied_without_a_session_being_cut(seed: int) -> None:
    """Running and suspended sessions leave it with their state, so no session is placed again."""
    world = World(seed, NONE, workers=3)
    world.run(2)
    for _ in range(4):
        world.arrive()
        world.run(0.5)
    suspended = world.random.choice(list(world.rows.values()))
    world.store.pause(suspended.id)
    world.run(5)
    drained = world.workers[world.rows[suspended.id].worker or ""]
    there = [row.id for row in world.rows.values() if row.worker == drained.id]
    placements = world.placements
    drained.phase = WorkerPhase.DRAINING
    world.run(120)
    assert drained.phase is WorkerPhase.GONE
    assert world.placements == placements
    assert {name for _, name in world.migrated} >= set(there)
    assert world.rows[suspended.id].phase is Phase.SUSPENDED


@drawn(1, soak=5)
def test_lost_reports_end_no_worker(seed: int) -> None:
    """Every load report is lost, and the scheduler is delayed and restarted: no worker is declared gone."""
    world = run_scenario(seed, Faults(lost_load=1.0, pause=0.05, restart=0.02, store_down=0.02), seconds=120)
    assert len(world.workers) == 3
    assert all(worker.phase is WorkerPhase.READY for worker in world.workers.values())


def test_a_dead_worker_is_found_within_the_time_out_and_a_little() -> None:
    world = World(1, NONE)
    world.run(20)
    session = world.arrive()
    assert session is not None
    world.run(2)
    owner = world.rows[session].worker
    assert owner is not None
    world.workers[owner].alive = False
    died = world.now
    while world.unserved():
        world.run(0.25)
        assert world.now - died < world.policy.worker_timeout_s + 2.0
    assert world.rows[session].worker != owner
    assert world.rows[session].epoch == 2


def test_no_viewer_watches() -> None:
    world = World(1, NONE, policy=Policy(idle_after_s=10.0))
    world.run(2)
    watched, forgotten = world.arrive(), world.arrive()
    assert watched is not None
    assert forgotten is not None
    for _ in range(30):
        world.feed(ViewersReported(watched, 1), world.generation)
        world.feed(ViewersReported(forgotten, 0), world.generation)
        world.run(1)
    assert world.rows[watched].phase is Phase.ACTIVE
    assert world.rows[forgotten].phase is Phase.SUSPENDED
    assert world.rows[forgotten].activity is Activity.IDLE


def test_a_pause_of_the_scheduler_makes_no_session_idle() -> None:
    world = World(1, NONE, policy=Policy(idle_after_s=10.0))
    world.run(2)
    session = world.arrive()
    assert session is not None
    world.run(1)
    world.paused_until = world.now + 60
    world.run(60.5)
    world.feed(ViewersReported(session, 1), world.generation)
    world.run(5)
    assert world.rows[session].phase is Phase.ACTIVE


def test_who_waits_longest_is_served_first() -> None:
    world = World(1, NONE, workers=1)
    [worker] = world.workers.values()
    worker.capacity = 2
    world.run(2)
    running = [world.arrive(), world.arrive()]
    world.run(2)
    waiting = []
    for _ in range(3):
        # More than fit, as after a worker's death.
        waiting.append(world.arrive(admit=True))
        world.run(0.5)
    for expected, ended in zip(waiting, [*running, waiting[0]], strict=True):
        assert expected is not None
        assert ended is not None
        assert world.rows[expected].phase is Phase.REQUESTED
        world.store.end(ended)
        world.run(2)
        assert world.rows[expected].phase is Phase.ACTIVE
