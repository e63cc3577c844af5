"""The end of a service: every closer is called, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.shared.conftest import Connect
from turboserve import service
from turboserve.bus import Bus
from turboserve.config import Settings
from turboserve.service import Runtime, run_service


async def closed(bus: Bus, *closers: Callable[[], Awaitable[None]]) -> list[dict[str, Any]]:
    """Run a service that stops at once. Returns its log lines about closers."""

    async def start(runtime: Runtime) -> None:
        for close in closers:
            runtime.on_stop(close)
        runtime.stopping.set()

    with capture_logs() as lines:
        status = await run_service(Runtime("gateway", Settings(), bus), start)
    assert status == 0
    return [dict(line) for line in lines if line["event"].startswith("close")]


async def test_a_closer_that_exceeds_its_deadline_is_a_warning(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer, or a process that was stopped meanwhile: no fault of the code."""
    monkeypatch.setattr(service, "CLOSE_S", 0.5)
    called: list[str] = []

    async def first() -> None:
        called.append("first")

    async def endless() -> None:
        called.append("endless")
        await asyncio.Event().wait()

    async def late() -> None:
        called.append("late")
        raise TimeoutError("no answer")

    lines = await closed(await connect("gateway"), first, endless, late)
    assert called == ["late", "endless", "first"]
    assert [(line["event"], line["log_level"]) for line in lines] == [("close timed out", "warning")] * 2
    assert not any("exc_info" in line for line in lines)


async def test_any_other_error_of_a_closer_has_its_traceback(connect: Connect) -> None:
    called: list[str] = []

    async def first() -> None:
        called.append("first")

    async def broken() -> None:
        raise ValueError("a fault")

    lines = await closed(await connect("gateway"), first, broken)
    assert called == ["first"]
    assert [(line["event"], line["log_level"]) for line in lines] == [("close failed", "error")]
    assert lines[0]["exc_info"]
