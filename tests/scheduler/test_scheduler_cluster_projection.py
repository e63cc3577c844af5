"""The cluster projection equals the scheduler's view, although only changes are applied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduler.scheduler_faults import MANY
from tests.scheduler.scheduler_world import World
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import Event
from turboserve.scheduler.projections import session_state, worker_state


def compare(core: Scheduler, now: float) -> None:
    view, listened = core.view, core.listening.now
    cluster = core.projection.cluster(now, listened)
    assert cluster.workers.keys() == view.workers.keys()
    for name, worker in view.workers.items():
        known = cluster.workers[name]
        # Silence is checked only from time to time.
        expected = worker_state(worker, now, listened, core.policy.worker_timeout_s)
        assert known == replace(expected, suspect=known.suspect)
        assert cluster.entries[name].held == worker.load
    assert cluster.sessions.keys() == view.sessions.keys()
    for name, session in view.sessions.items():
        known_session = cluster.sessions[name]
        sizes = {session.record.model: known_session.state_bytes}
        assert known_session == session_state(view, session, now, sizes)
        assert cluster.urgency.slacks.get(name) == session.slack
    assert cluster.urgency.slacks.keys() <= view.sessions.keys()


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
