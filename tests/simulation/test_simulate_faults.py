"""Each kind of fault is drawn and occurs; the product's reaction to the newer ones, step by step."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest

from tests.simulation.simulate_scene import Scene, scene
from turboserve.contracts.sessions import Decision, Phase
from turboserve.simulation.faults import CALM, Faults, draw
from turboserve.simulation.roles import with_role_faults
from turboserve.simulation.runtime.device import backend
from turboserve.simulation.scenario import run_scenario
from turboserve.simulation.virtual_worker import VirtualWorker
from turboserve.worker.engine.snapshot import state_fingerprint
from turboserve.worker.model.config import ModelConfig

UPDATES = Faults(new_weights=0.1, device_lost=0.05, hot_freeze=0.2, hot_slow=0.2)


def test_each_kind_is_drawn_in_some_of_sixty_seeds_and_missing_in_others() -> None:
    climates = [
        with_role_faults(draw(random.Random(f"climate {seed}")), seed) for seed in range(80_000, 80_060)
    ]
    for kind in dataclasses.fields(Faults):
        drawn = [getattr(climate, kind.name) for climate in climates]
        assert any(rate != getattr(CALM, kind.name) for rate in drawn), kind.name
        assert any(rate != drawn[0] for rate in drawn), kind.name


def test_what_is_drawn_takes_place() -> None:
    outcome = run_scenario(2, faults=UPDATES, seconds=15.0, keep_lines=True)
    for fault in ("redis freezes", "redis slow", "device lost", "checkpoint 2", "replaced"):
        assert any(f"  {fault}" in line for line in outcome.lines), fault
    assert outcome.violations == {}


def decisions(one: Scene, kind: str) -> list[Decision]:
    rows = one.world.postgres.tables.decisions.rows.values()
    return [row.decision for row in rows if row.decision.kind == kind and row.decision.session == one.session]


def fails(one: Scene, worker: VirtualWorker) -> None:
    """Kill the worker's process and wait until the pool is whole again."""
    assert worker.service is not None
    worker.service.kill("kill -9")
    one.until(lambda: worker.name in one.world.checker.gone)


def goes_on(one: Scene, worker: str | None) -> VirtualWorker:
    """Wait until the session makes chunks on another worker. Returns that worker."""
    one.until(lambda: one.row.phase is Phase.ACTIVE and one.row.worker not in (None, worker))
    made = one.row.next_chunk
    one.until(lambda: one.row.next_chunk > made)
    return one.worker(one.row.worker)


def test_a_worker_whose_device_fails_says_goodbye() -> None:
    with scene() as one:
        one.session_runs()
        owner = one.worker(one.row.worker)
        assert owner.service is not None
        began = one.world.loop.time()
        one.world.lose_device(owner.service)
        one.until(lambda: owner.name in one.world.checker.gone)
        # Long before it would be declared gone.
        assert one.world.loop.time() - began < one.world.scale.times["worker_timeout_s"] / 2
        assert [decision.worker for decision in decisions(one, "device_error")] == [owner.name]
        goes_on(one, owner.name)
        one.rests()


def test_a_device_that_is_repaired_after_it_failed_a_step_counts_as_lost() -> None:
    with scene() as one:
        one.session_runs()
        owner = one.worker(one.row.worker)
        assert owner.service is not None
        assert owner._platform is not None
        faults = owner._platform.faults
        one.world.lose_device(owner.service)
        one.until(lambda: faults.failed)
        owner.repair_device()
        one.until(lambda: owner.name in one.world.checker.gone)
        # The state store counts a device error for the session, and so does the check.
        assert [decision.worker for decision in decisions(one, "device_error")] == [owner.name]
        assert one.world.checker.device_deaths[one.session] == 1
        one.rests()


def test_a_session_stays_with_its_weights_while_a_worker_has_them() -> None:
    with scene(workers=3) as one:
        world = one.world
        one.session_runs()
        owner = one.worker(one.row.worker)
        # With another session on it, the required worker is not the one that load would select.
        created = one.does(one.users.create(2))
        one.until(created.done)
        mates = world.postgres.tables.sessions.rows
        one.until(lambda: mates[created.result().id].record.worker is not None)
        other = one.worker(mates[created.result().id].record.worker)
        [replaced] = (worker for worker in world.workers.values() if worker not in (owner, other))
        digest = one.row.weights_digest
        assert digest is not None
        world.change_weights()
        fails(one, replaced)
        one.until(lambda: world.free_slots() == 4)
        newest = list(world.workers.values())[-1]
        assert newest.weights != owner.weights
        fails(one, owner)
        assert goes_on(one, owner.name) is other
        assert one.row.weights_digest == digest
        # No other worker has the state: the session continues from its latents, and the row records it.
        fails(one, other)
        after = goes_on(one, other.name)
        assert after.weights == newest.weights
        assert one.row.weights_digest not in (None, digest)
        assert digest in decisions(one, "recover")[-1].reason
        one.rests()


def test_weights_that_no_digest_covers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session would migrate between two checkpoints of one preset."""

    @cache
    def without_weights(config: ModelConfig, _weights: str) -> str:
        return state_fingerprint(config, "any")

    monkeypatch.setattr(backend, "_fingerprint", without_weights)
    with scene() as one:
        world = one.world
        one.session_runs()
        epoch = one.row.epoch
        world.change_weights()
        fails(one, next(worker for worker in world.workers.values() if worker.name != one.row.worker))
        one.until(lambda: world.free_slots() == 3)
        one.does(one.users.ask(lambda g: g.sessions.migrate(None, one.session, None), 1))
        one.until(lambda: one.row.epoch > epoch)
        assert world.checker.violations["verified_before_flip"] > 0
