"""Planted faults: each check can fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest

from tests.simulation.simulate_plants import BUSY, all_on_the_first, is_found, violations, without_fence
from tests.simulation.simulate_scene import scene
from turboserve.autoscaler import app as autoscaler_app
from turboserve.autoscaler import lifecycle
from turboserve.autoscaler.control.advisor import Advisor
from turboserve.autoscaler.control.events import Advice
from turboserve.autoscaler.control.feedback_monitor import FeedbackMonitor
from turboserve.autoscaler.pool_term import PoolTerm
from turboserve.bus.chunk_log import Chunk, ChunkLog, StreamStart
from turboserve.contracts.sessions import SessionRecord
from turboserve.leadership import Leadership
from turboserve.scheduler.placement import Choice, Cluster, Demand, MinMax
from turboserve.simulation import command, scenario
from turboserve.simulation.faults import CALM, Faults
from turboserve.simulation.runtime.broker.jetstream import JetStream
from turboserve.simulation.runtime.broker.stream import Stream
from turboserve.simulation.runtime.device.backend import VirtualBackend
from turboserve.simulation.runtime.device.contents import VirtualState
from turboserve.simulation.runtime.rows.progress import MemoryProgress
from turboserve.simulation.settings import Scale
from turboserve.state_store.core import sessions, workers
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.session import Session
from turboserve.worker.service import commands
from turboserve.worker.service.assignments import Lease
from turboserve.worker.service.engine_driver import EngineDriver
from turboserve.worker.service.table import Table
from turboserve.worker.service.worker import Worker

SOON_S = 15.0
"""Time by which a calm world without a fault has long settled and, at its end, given its memory back."""


def test_a_broker_without_the_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "_check", without_fence("chunk."))
    assert is_found("one_executor", range(40), BUSY, finds=8)


def test_a_worker_that_ignores_its_lease_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "renewed", lambda self, _: setattr(self, "until", math.inf))
    assert is_found("one_executor", range(40), Faults(cut={"worker": 0.1}), seconds=25.0, finds=5)


def test_an_engine_that_does_not_look_at_the_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was frozen generates its next chunk before it learns that its lease has ended."""

    def step(self: EngineDriver) -> list[Any]:
        return self.engine.step(self._now()) if self.generate_until > -math.inf else []

    monkeypatch.setattr(EngineDriver, "step", step)
    monkeypatch.setattr(EngineDriver, "generating", property(lambda self: self.generate_until > -math.inf))
    assert is_found("one_executor", range(20), Faults(freeze={"worker": 0.1}), seconds=25.0, finds=3)


def test_a_store_that_does_not_raise_the_epoch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(record: SessionRecord, worker: str | None) -> dict[str, Any]:
        return {"epoch": max(record.epoch, 1), "worker": worker, "own_revision": None}

    monkeypatch.setattr(sessions, "assign_owner", same)
    assert is_found("epochs_increase", range(10), BUSY, finds=4)


def test_a_stale_owner_in_the_log_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's own message, late: without the fence it would make an earlier epoch the current one."""
    monkeypatch.setattr(Stream, "_check", without_fence("own."))
    faults = Faults(late_request=0.3, crash={"worker": 0.1})
    assert is_found("epochs_increase", range(60), faults, seconds=20.0)


def test_a_broker_that_does_not_know_repeated_messages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "_remember", lambda *_: None)
    assert is_found("chunks_contiguous", range(20), Faults(lost_answer=0.15), seconds=20.0, finds=4)


def test_a_migration_of_another_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transferred state has a valid digest, but it is not the state that ends the log."""
    pages_quiesced = VirtualBackend.pages_quiesced

    def older(self: VirtualBackend, session: Session) -> Any:
        state = session.state
        assert isinstance(state, VirtualState)
        number, state.number = state.number, state.number + 1
        try:
            return pages_quiesced(self, session)
        finally:
            state.number = number

    monkeypatch.setattr(VirtualBackend, "pages_quiesced", older)
    assert is_found("verified_before_flip", range(40), CALM, finds=1)


def test_a_store_that_does_not_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.Slots, "check_room", lambda self, worker, retry_s: None)
    monkeypatch.setattr(MinMax, "assign", all_on_the_first)
    assert is_found("capacity", range(20), CALM, finds=1)


def test_a_session_that_is_never_placed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(self: MinMax, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        return [Choice(demand.session, None, "not today") for demand in demands]

    monkeypatch.setattr(MinMax, "assign", nobody)
    monkeypatch.setattr(scenario, "SETTLE_S", SOON_S)
    assert is_found("converges_after_faults", range(6), CALM, seconds=6.0)


def test_memory_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out = EngineDriver.carry_out

    def keeps(self: EngineDriver, command: Any) -> None:
        if not isinstance(command, commands.Evict):
            carry_out(self, command)

    monkeypatch.setattr(EngineDriver, "carry_out", keeps)
    monkeypatch.setattr(scenario, "END_S", SOON_S)
    assert is_found("memory_returns", range(4), CALM, seconds=8.0, finds=1)


def test_a_reader_that_misses_a_lost_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker does not name the previous message, and the gateway ignores the index."""
    republish = JetStream._republish

    async def unchecked(
        self: ChunkLog, session: str, start: StreamStart, ended: Any, _made: Any
    ) -> AsyncGenerator[Chunk, None]:
        async def lost() -> None:
            """Do nothing about a lost message."""

        async for entry in self._entries(session, start.sequence, ended, lost):
            chunk = await self._followed(session, entry)
            if chunk is not None and chunk.header.index >= start.index:
                yield chunk

    monkeypatch.setattr(
        JetStream, "_republish", lambda self, stream, stored, before: republish(self, stream, stored, 0)
    )
    monkeypatch.setattr(ChunkLog, "follow", unchecked)
    assert is_found("client_sees_prefix", range(20), Faults(lost_hint=0.3))


def test_a_gateway_and_a_worker_that_do_not_notice_a_lost_end_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker loses the newest chunks. Their worker waits for a viewer, who waits for one of them."""

    async def waiting(
        self: ChunkLog, session: str, start: StreamStart, ended: Any, _made: Any
    ) -> AsyncGenerator[Chunk, None]:
        expected = start.index

        async def lost() -> None:
            """Do nothing about a lost chunk."""

        async for entry in self._entries(session, start.sequence, ended, lost):
            chunk = await self._followed(session, entry)
            if chunk is not None and chunk.header.index == expected:
                expected += 1
                yield chunk

    monkeypatch.setattr(ChunkLog, "follow", waiting)
    monkeypatch.setattr(Worker, "_check_connection", lambda self: None)
    monkeypatch.setattr(scenario, "SETTLE_S", SOON_S)
    with scene(workers=1) as one:
        one.session_runs()
        one.loses_unseen_chunks(0.3)
        one.world.mark_calm()
        assert scenario.settle(one.world, one.users) is None
        assert set(one.world.checker.violations) == {"converges_after_faults"}


def test_a_pool_that_ends_busy_workers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: lifecycle.Lifecycle, slot: Any, now: float) -> None:
        self.release(slot, "no longer wanted", now)

    monkeypatch.setattr(lifecycle.Lifecycle, "_drain", at_once)
    assert is_found("scale_in_harmless", range(40, 100), CALM, seconds=25.0, finds=48)


def test_a_controller_that_trusts_silence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeedbackMonitor, "is_stale", lambda self, now: self.heard_at is None)
    faults = Faults(cut={"scheduler": 0.2}, crash={"scheduler": 0.2})
    assert is_found("stale_metrics_never_shrink", range(80), faults, seconds=25.0, finds=20)


def test_a_controller_that_swings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advise = Advisor.advise

    def swings(self: Advisor, size: int, wakes: bool, now: float) -> Advice:
        least, most = self.policy.least, self.policy.most
        return dataclasses.replace(advise(self, size, wakes, now), size=least if int(now) % 2 else most)

    monkeypatch.setattr(Advisor, "advise", swings)
    seeds = range(0, 200, scenario.WATCH_EVERY)
    assert is_found("bounded_scaling", seeds, CALM, seconds=6.0, finds=24)


def test_event_numbers_that_are_not_stored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of an applied prompt get their numbers, and the next change uses the numbers again."""

    async def forgets(self: MemoryProgress, session: str, event_sequence: int) -> None:
        """Leave the row at the number before."""

    monkeypatch.setattr(MemoryProgress, "number_events", forgets)
    assert is_found("events_numbered", range(20), CALM, seconds=20.0, finds=2)


def test_an_engine_that_lowers_pinned_sessions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = Scale(workers=1, most_workers=1, slots=3, fidelity="in-time")
    assert violations(range(1, 4), CALM, scale=crowded) == set()
    lowest = FidelityLadder.lowest
    monkeypatch.setattr(FidelityLadder, "lowest", lambda self, floor, pinned: lowest(self, floor, False))
    assert is_found("pinned_is_best", range(20), CALM, scale=crowded)


def test_two_leaders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leadership, "leads", lambda self, now: self.term is not None)
    faults = Faults(freeze={"scheduler": 0.1}, cut={"scheduler": 0.1})
    assert is_found("one_leader", range(40), faults, finds=24)


def test_an_autoscaler_that_decides_after_its_term_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(pool: str, number: int, leads: object, on_lost: Callable[[], None]) -> PoolTerm:
        return PoolTerm(pool, number, lambda now: True, on_lost)

    monkeypatch.setattr(autoscaler_app, "PoolTerm", always)
    pair = Scale(workers=1, most_workers=2).with_failover()
    faults = Faults(freeze={"autoscaler": 0.3})
    assert is_found("one_leader", range(40), faults, scale=pair, finds=26)


def test_a_core_that_decides_by_more_than_its_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set[str]()

    def remembers(self: MinMax, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        """Place sessions that it has seen, in this run or an earlier one, on another worker."""
        free = [each.worker for each in cluster.candidates() if each.load < each.capacity]
        choices = [Choice(d.session, free[-(d.session in met)] if free else None, "met") for d in demands]
        met.update(demand.session for demand in demands)
        return choices

    monkeypatch.setattr(MinMax, "assign", remembers)
    monkeypatch.setattr(command, "TWICE_EVERY", 1)
    found = (
        command.run(seeds=1, first=seed, seconds=8.0)["violations"]["deterministic"] for seed in range(1, 8)
    )
    assert any(found)


def test_a_core_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: Table, message: Any, now: float) -> list[commands.Command]:
        raise ZeroDivisionError

    monkeypatch.setattr(Table, "handle", raises)
    assert is_found("no_core_fails", [1], CALM, seconds=6.0)
