"""What ends a scheduler before it competes for the lead."""

from __future__ import annotations

from typing import Any

import pytest

from turboserve.scheduler import app
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.settings import SchedulerSettings


async def test_a_policy_that_cannot_be_imported_ends_the_process_before_it_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a standby it would look ready, take the lead, end, and take it again after each restart."""
    served: list[Any] = []

    async def serve(*arguments: Any) -> None:
        served.append(arguments)

    def broken(_: SchedulerSettings) -> Scheduler:
        raise ModuleNotFoundError("No module named 'policy'")

    monkeypatch.setattr(app, "serve", serve)
    runtime: Any = None
    with pytest.raises(ModuleNotFoundError, match="policy"):
        await app.start(runtime, SchedulerSettings(), broken)
    assert not served
    await app.start(runtime, SchedulerSettings())
    assert len(served) == 1
