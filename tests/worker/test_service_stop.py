"""The order in which a worker ends: what others wait for comes first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from turboserve.clock import SystemClock
from turboserve.worker.service.worker import Worker


async def test_the_goodbye_does_not_wait_for_a_copy_that_takes_long_to_end() -> None:
    """Its sessions moved only when its silence was taken for death: hashing a large state ended too late."""
    said: list[str] = []
    left = asyncio.Event()

    async def leave() -> None:
        said.append("goodbye")
        left.set()

    async def copies_end() -> None:
        await left.wait()
        said.append("copies have ended")

    parts: dict[str, Any] = {
        "_engine": SimpleNamespace(
            submit=lambda _: said.append("stop"), stop=lambda _: said.append("engine")
        ),
        "_packager": SimpleNamespace(stop=lambda _: said.append("packager")),
        "_moves": SimpleNamespace(fetch_no_more=lambda: said.append("no more"), stop=copies_end),
        "heartbeat": SimpleNamespace(leave=leave),
        "table": SimpleNamespace(unpublished=0),
        "_clock": SystemClock(),
        "_tasks": set(),
    }
    worker = object.__new__(Worker)
    for name, part in parts.items():
        setattr(worker, name, part)
    async with asyncio.timeout(30.0):
        await worker.stop()
    assert said == ["no more", "stop", "engine", "packager", "goodbye", "copies have ended"]
