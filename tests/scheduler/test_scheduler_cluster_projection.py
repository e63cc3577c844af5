"""The cluster projection equals the scheduler's view, although only changes are applied."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from turboserve.scheduler.cluster_projection import session_state, worker_state
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import Event


def simulation() -> ModuleType:
    """Import the model of the scheduler's surroundings that its simulation uses."""
    name = "scheduler_simulation_for_pictures"
    if name not in sys.modules:
        path = Path(__file__).with_name("test_scheduler_simulation.py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def compare(core: Scheduler, now: float) -> None:
    view, listened = core.view, core.listening.now
    cluster = core.picture.cluster(now, listened)
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


@pytest.mark.parametrize("seed", range(4))
def test_changes_alone_keep_the_picture_true(seed: int) -> None:
    model = simulation()

    class World(model.World):  # type: ignore[misc, name-defined]
        compared = 0

        def feed(self, event: Event, generation: int) -> None:
            super().feed(event, generation)
            if self.now >= self.paused_until:
                compare(self.core, self.now)
                self.compared += 1

    world = World(seed, model.MANY)
    for _ in range(60):
        for _ in range(world.random.choice((0, 0, 1, 1, 4))):
            world.fiddle()
        world.run(0.5)
    assert world.compared > 200
    assert world.placements > 0
