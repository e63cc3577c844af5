"""The cluster projection and the load feedback equal the scheduler's view, although only changes are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.scheduler.scheduler_faults import MANY
from tests.scheduler.scheduler_world import World
from turboserve.contracts.loans import LoanRole, WorkerLoan
from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.load_feedback import WorkerLoads, load_feedback
from turboserve.scheduler.messages import (
    Command,
    Event,
    LoadReported,
    MigrationRequested,
    SendFeedback,
    Tick,
    ViewersReported,
)
from turboserve.scheduler.projections import LOOK_S, session_state, worker_state
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_view import SUSPECT_AFTER


def compare(core: Scheduler, now: float) -> None:
    view, listened = core.view, core.listening.now
    cluster = core.projection.cluster(now, listened)
    assert cluster.workers.keys() == view.workers.keys()
    for name, worker in view.workers.items():
        known = cluster.workers[name]
        timeout_s = core.policy.worker_timeout_s
        expected = worker_state(worker, now, listened, timeout_s)
        assert known == replace(expected, suspect=known.suspect)
        # A report ends suspicion at once. Silence is checked only from time to time.
        if known.suspect != expected.suspect:
            assert expected.suspect
            assert listened - worker.heard_at <= timeout_s * SUSPECT_AFTER + LOOK_S
        assert cluster.entries[name].held == worker.load
    assert cluster.sessions.keys() == view.sessions.keys()
    for name, session in view.sessions.items():
        known_session = cluster.sessions[name]
        sizes = {session.record.model: known_session.state_bytes}
        assert known_session == session_state(view, session, now, sizes)
        assert cluster.urgency.slacks.get(name) == session.slack
    assert cluster.urgency.slacks.keys() <= view.sessions.keys()


def feedback_of_all(core: Scheduler, now: float) -> dict[str, LoadFeedback]:
    """Return the load feedback by model, with every worker read again."""
    loads = WorkerLoads(core.view)
    loads.update(core.projection.cluster(now, core.listening.now), core.view.workers)
    return {one.model: one for one in load_feedback(core.view, loads, core.decisions)}


@pytest.mark.parametrize("seed", range(4))
def test_feedback_is_that_of_all_workers(seed: int) -> None:
    class FedBackWorld(World):
        reports_quality = True
        compared = 0
        drawn: Counter[str] = Counter()

        def __init__(self, seed: int) -> None:
            self.newest: dict[str, LoadFeedback] = {}
            super().__init__(seed, MANY)

        def check(self, command: Command) -> None:
            super().check(command)
            if isinstance(command, SendFeedback):
                self.newest[command.feedback.model] = command.feedback

        def feed(self, event: Event, generation: int) -> None:
            super().feed(event, generation)
            quiet = isinstance(event, Tick | LoadReported | ViewersReported | MigrationRequested)
            handled = generation == self.generation and self.now >= self.paused_until
            if handled and self.core.synced and not quiet:
                expected = feedback_of_all(self.core, self.now)
                assert expected == self.newest
                self.compared += 1
                for one in expected.values():
                    self.drawn["debt"] += 0.0 < one.quality_debt < 1.0
                    self.drawn["deficit"] += one.deficit > 0.0
                    self.drawn["borrowing"] += one.borrowing > 0
                    self.drawn["floor"] += (
                        one.floor_capacity is not None and one.floor_capacity > one.capacity
                    )

    world = FedBackWorld(seed)
    for _ in range(60):
        for _ in range(world.random.choice((0, 0, 1, 1, 4))):
            world.fiddle()
        world.run(0.5)
    assert world.compared > 50
    assert min(world.drawn[of] for of in ("debt", "deficit", "floor", "borrowing")) > 10


LOAN = WorkerLoan(role=LoanRole.DONOR, peer="b")


def test_a_report_without_news_changes_no_worker() -> None:
    view = View()
    view.put_worker(worker_row(), 0.0)
    report = LoadReport(
        worker="a", model="m", capacity=2, chunk_latency_s={1: 0.1}, host="h", transfer=("x",)
    )
    view.put_report(report, 1.0, 1.0)
    assert view.changed_workers == {"a"}
    view.changed_workers.clear()
    view.put_report(report, 2.0, 2.0)
    assert view.changed_workers == set()
    assert view.workers["a"].heard_at == 2.0
    for news in ({"capacity": 3}, {"deficit": 1.0}, {"loan": LOAN}, {"chunk_latency_s": {1: 0.2}}):
        view.put_report(report.model_copy(update=news), 3.0, 3.0)
        assert view.changed_workers == {"a"}
        view.changed_workers.clear()


def worker_row() -> WorkerRecord:
    return WorkerRecord(id="a", model="m", phase=WorkerPhase.READY, capacity=2, started_at=1, renewed_at=1)


@pytest.mark.parametrize("seed", range(4))
def test_changes_alone_keep_the_picture_true(seed: int) -> None:
    class ComparedWorld(World):
        compared = 0

        def feed(self, event: Event, generation: int) -> None:
            super().feed(event, generation)
            if self.now >= self.paused_until:
                compare(self.core, self.now)
                self.compared += 1

    world = ComparedWorld(seed, MANY)
    for _ in range(60):
        for _ in range(world.random.choice((0, 0, 1, 1, 4))):
            world.fiddle()
        world.run(0.5)
    assert world.compared > 200
    assert world.placements > 0
