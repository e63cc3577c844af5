"""Rules changed in the product alone: the simulator has none of its own, so it shows the effect of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.simulation.simulate_plants import BUSY, is_found
from turboserve.bus import append as log_append
from turboserve.simulation.faults import CALM, Faults
from turboserve.state_store.core import workers
from turboserve.state_store.ports.records import PendingEvent
from turboserve.state_store.publish.outbox import Outbox
from turboserve.worker.service import wire


def test_an_admission_rule_that_changed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule admits one session too many for each model."""
    admit = workers.ModelCapacity.admit

    def one_more(self: workers.ModelCapacity, retry_s: float) -> None:
        admit(workers.ModelCapacity(self.model, self.known, self.capacity, max(0, self.demand - 1)), retry_s)

    monkeypatch.setattr(workers.ModelCapacity, "admit", one_more)
    assert is_found("capacity", range(20), CALM, seconds=25.0)


def test_an_epoch_check_that_is_skipped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker appends without the condition that it still owns the session."""
    append = log_append

    async def unconditional(*args: Any, expect: Any = None, **options: Any) -> Any:
        return await append(*args, **options)

    monkeypatch.setattr(wire, "append", unconditional)
    assert is_found("one_executor", range(40), BUSY, finds=8)


def test_an_outbox_that_loses_a_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several waiting events, the outbox treats the last as published."""
    published_before = Outbox._published_before

    async def one_too_many(self: Outbox, pending: Sequence[PendingEvent]) -> list[int]:
        numbers = await published_before(self, pending)
        return [*numbers, pending[-1].number] if len(pending) > 1 else numbers

    monkeypatch.setattr(Outbox, "_published_before", one_too_many)
    assert is_found("events_complete", range(20), Faults(crash={"state-store": 0.1}))
