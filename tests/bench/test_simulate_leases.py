"""Nobody generates whose sessions may be another's: two ways in which that went wrong, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulate_scene import SESSION, Scene

from turboserve import subjects
from turboserve.bench.simulate import play
from turboserve.bench.simulate.kernel import Awaited, Program
from turboserve.state_store.core.leases import Leases
from turboserve.worker.service.lease import Lease

LONG_S = 100.0
ON_ITS_WAY_S = 0.3


def a_worker_is_buried_and_then_finds_no_store() -> Scene:
    """It was cut off and taken for dead. When it is back the state store is away, so it is not told."""
    with play.quiet():
        scene = Scene()
        world = scene.world
        scene.session_runs()
        worker = scene.worker(scene.row.worker)
        world.network.cut_off(worker.program, LONG_S)
        scene.until(lambda: worker.id in world.checker.gone)
        world.store.program.on_death = lambda _program, _why: None
        world.store.program.kill("kill -9")
        world.network.cut.clear()
        world.kernel.run(5.0)
        assert worker.program.up
        assert SESSION in worker.table.entries
        world.close()
    return scene


def test_a_worker_that_may_be_buried_is_not_excused() -> None:
    scene = a_worker_is_buried_and_then_finds_no_store()
    assert scene.world.checker.messages == []


def test_an_excuse_that_brings_a_lease_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "excused", Lease.renewed)
    scene = a_worker_is_buried_and_then_finds_no_store()
    assert scene.world.checker.violations["one_executor"] > 0


def a_worker_comes_back_while_its_death_is_on_its_way() -> Scene:
    """It renews after the scheduler has read its row for the last time, and before the verdict arrives."""
    with play.quiet():
        scene = Scene()
        world = scene.world
        scene.session_runs()
        worker = scene.worker(scene.row.worker)
        call = world.network.call
        verdicts: list[Callable[[], None]] = []

        def slowly(source: Program, service: str, name: str, *rest: Any) -> Awaited[Any]:
            if name != subjects.WORKER_GONE.subject:
                return call(source, service, name, *rest)
            outcome: Awaited[Any] = Awaited()
            verdicts.append(lambda: call(source, service, name, *rest).then(outcome.settle))
            return outcome

        world.network.call = slowly  # type: ignore[method-assign]
        world.network.cut_off(worker.program, LONG_S)
        scene.until(lambda: len(verdicts) > 0)
        world.network.cut.clear()
        scene.until(lambda: worker.engine.generating)
        world.kernel.run(ON_ITS_WAY_S)
        verdicts.pop()()
        world.kernel.run(5.0)
        world.close()
    return scene


def test_a_worker_that_has_come_back_is_not_buried() -> None:
    scene = a_worker_comes_back_while_its_death_is_on_its_way()
    assert scene.world.checker.messages == []
    assert scene.world.checker.gone == set()
    assert scene.row.epoch == 1


def test_a_burial_that_looks_at_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "check_silent", lambda *_: None)
    scene = a_worker_comes_back_while_its_death_is_on_its_way()
    assert scene.world.checker.violations["one_executor"] > 0
