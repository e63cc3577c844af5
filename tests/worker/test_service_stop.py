"""The order in which a worker ends: first the steps that others wait for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from turboserve.clock import SystemClock
from turboserve.tasks import BackgroundTasks
from turboserve.worker.service.worker import Worker


def stopping(said: list[str], *, engine_ends: bool) -> Worker:
    """Return a worker of which only the order of its end is real; `said` records the steps."""
    left = asyncio.Event()

    async def leave() -> None:
        said.append("goodbye")
        left.set()

    async def copies_end() -> None:
        if engine_ends:
            await left.wait()
        said.append("copies have ended")

    async def engine_end(_: float) -> None:
        said.append("engine")

    async def packager_end(_: float) -> None:
        said.append("packager")

    parts: dict[str, Any] = {
        "_engine": SimpleNamespace(
            submit=lambda _: said.append("stop"),
            end=engine_end,
            alive=not engine_ends,
        ),
        "_packager": SimpleNamespace(end=packager_end),
        "migrations": SimpleNamespace(fetch_no_more=lambda: said.append("no more"), stop=copies_end),
        "heartbeat": SimpleNamespace(leave=leave),
        "table": SimpleNamespace(unpublished=0),
        "_audiences": SimpleNamespace(close=lambda: said.append("viewers")),
        "logs": SimpleNamespace(close=lambda: said.append("publications")),
        "_clock": SystemClock(),
        "_tasks": BackgroundTasks(),
    }
    worker = object.__new__(Worker)
    for name, part in parts.items():
        setattr(worker, name, part)
    return worker


async def test_the_goodbye_does_not_wait_for_a_copy_that_takes_long_to_end() -> None:
    """Incident: the hash of a large state ended too late; sessions got new workers only after the worker's
    timeout."""
    said: list[str] = []
    async with asyncio.timeout(30.0):
        await stopping(said, engine_ends=True).stop()
    assert said == [
        "no more",
        "stop",
        "engine",
        "packager",
        "goodbye",
        "copies have ended",
        "viewers",
        "publications",
    ]


async def test_there_is_no_goodbye_while_the_engine_may_still_make_chunks() -> None:
    """The final report gives its sessions to other workers, whatever the lease."""
    said: list[str] = []
    async with asyncio.timeout(30.0):
        await stopping(said, engine_ends=False).stop()
    assert said == ["no more", "stop", "engine", "packager", "copies have ended", "viewers", "publications"]
