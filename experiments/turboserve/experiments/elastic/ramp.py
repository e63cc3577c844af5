"""Sessions that are created one after another, stay, and end. Each has its own viewer."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from turboserve.bench.stream import prompts
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.received import Received
from turboserve.bench.streaming.viewer import Viewer
from turboserve.tasks import stop

RECOVERED = "recover"
"""Kind of a placement after a worker's death, which a scale-in must never cause."""


@dataclass
class Ramp:
    """Viewers of all sessions so far; those in `open` play."""

    api: httpx.AsyncClient
    viewers: list[Viewer] = field(default_factory=list)
    refused: int = 0
    _watching: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def open(self) -> list[Viewer]:
        return [viewer for viewer in self.viewers if viewer.session in self._watching]

    async def come(self) -> None:
        """Create one more session, watched until `leave`."""
        prompt, _ = prompts(len(self.viewers))
        try:
            viewer = await Viewer.create(self.api, prompt, seed=len(self.viewers))
        except ProblemError:
            self.refused += 1
            return
        self.viewers.append(viewer)
        self._watching[viewer.session] = asyncio.create_task(viewer.watch())

    async def leave(self, viewer: Viewer) -> None:
        """End the session, as its user."""
        viewer.player.tick(time.monotonic())
        task = self._watching.pop(viewer.session)
        await stop(task)
        with suppress(asyncio.CancelledError, ProblemError):
            task.result()
        await viewer.delete()

    async def leave_all(self) -> None:
        for viewer in self.open:
            with suppress(ProblemError, httpx.HTTPError):
                await self.leave(viewer)

    def all_chunks(self) -> list[Received]:
        return [chunk for viewer in self.viewers for chunk in viewer.chunks]

    def harmed(self) -> list[dict[str, Any]]:
        """Return the sessions that failed, lost or repeated a chunk, or were rebuilt after a worker's end."""
        found = []
        for viewer in self.viewers:
            kinds = [event.get("kind") for event in viewer.events if event["type"] == "session.placed"]
            failed = any(
                event["type"] == "session.ended" and event.get("phase") == "failed" for event in viewer.events
            )
            player = viewer.player
            if failed or player.lost or player.repeated or RECOVERED in kinds or not viewer.chunks:
                found.append(
                    {
                        "session": viewer.session,
                        "failed": failed,
                        "lost": player.lost,
                        "repeated": player.repeated,
                        "recovered": kinds.count(RECOVERED),
                        "chunks": len(viewer.chunks),
                    }
                )
        return found

    def migrations(self) -> int:
        """Count the changes of worker of playing sessions."""
        return sum(
            before.worker != after.worker
            for viewer in self.viewers
            for before, after in zip(viewer.chunks, viewer.chunks[1:], strict=False)
        )
