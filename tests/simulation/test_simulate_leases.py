"""No worker generates while its sessions may be another's: two past failures, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.simulation.simulate_scene import Scene, scene
from turboserve.bus import Bus
from turboserve.contracts.requests import WorkerGone
from turboserve.state_store.core.workers import Leases
from turboserve.subjects import WORKER_GONE
from turboserve.worker.service.assignments import Lease

LONG_S = 100.0
ON_ITS_WAY_S = 0.3


@contextmanager
def a_worker_is_taken_for_dead_and_then_finds_no_store() -> Iterator[Scene]:
    """The worker was cut off and declared gone. When it is back, the store is down and cannot inform it."""
    with scene() as one:
        world = one.world
        one.session_runs()
        worker = one.worker(one.row.worker)
        assert worker.service is not None
        world.broker.cut_off(worker.service.process, LONG_S)
        one.until(lambda: worker.name in world.checker.gone)
        world.restarts = False
        world.service("state-store-1").kill("kill -9")
        world.broker.repair()
        world.loop.advance(5.0)
        assert worker.alive
        assert worker.state(one.session) is not None
        yield one


def test_a_worker_that_may_be_taken_for_dead_is_not_excused() -> None:
    with a_worker_is_taken_for_dead_and_then_finds_no_store() as one:
        assert one.world.checker.messages == []


def test_an_excuse_that_brings_a_lease_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "excused", Lease.renewed)
    with a_worker_is_taken_for_dead_and_then_finds_no_store() as one:
        assert one.world.checker.violations["one_executor"] > 0


@contextmanager
def a_worker_comes_back_while_its_death_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """The worker renews after the scheduler's last read of its row, and before the declaration arrives."""
    call = Bus.call
    verdicts: list[WorkerGone] = []
    arrives = asyncio.Event()

    async def slowly(self: Bus, endpoint: Any, request: Any, *, deadline_s: float | None = None) -> Any:
        if endpoint is not WORKER_GONE or verdicts:
            return await call(self, endpoint, request, deadline_s=deadline_s)
        verdicts.append(request)
        await arrives.wait()
        return await call(self, endpoint, request, deadline_s=deadline_s)

    with scene() as one:
        world = one.world
        one.session_runs()
        monkeypatch.setattr(Bus, "call", slowly)
        worker = one.worker(one.row.worker)
        assert worker.service is not None
        world.broker.cut_off(worker.service.process, LONG_S)
        one.until(lambda: len(verdicts) > 0)
        world.broker.repair()
        one.until(lambda: worker.generating)
        world.loop.advance(ON_ITS_WAY_S)
        arrives.set()
        world.loop.advance(5.0)
        yield one


def test_a_worker_that_has_come_back_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_worker_comes_back_while_its_death_is_on_its_way(monkeypatch) as one:
        assert one.world.checker.messages == []
        assert not one.world.checker.gone


def test_a_verdict_that_looks_at_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "check_silent", lambda *_: None)
    with a_worker_comes_back_while_its_death_is_on_its_way(monkeypatch) as one:
        assert one.world.checker.violations["one_executor"] > 0
