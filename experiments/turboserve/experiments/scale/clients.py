"""The sessions of a run: arrivals, viewers, prompts, pauses and migrations."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import httpx

from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.rest import request
from turboserve.bench.streaming.viewer import Viewer
from turboserve.tasks import stop

PROMPT = "a red circle"
REPORT_S = 1.0
"""Time between two reports of a viewer's playhead."""
ACTION_S = 15.0
"""Mean time between two actions of one viewer."""
PAUSE_S = (3.0, 8.0)
"""Bounds of a pause, seconds."""
APPLIED_LIMIT_S = 60.0
ACTIONS = ("prompt", "prompt", "pause", "migrate")


@dataclass
class Clients:
    """All sessions. A share of them is watched and acts, the others wait for a viewer."""

    api: httpx.AsyncClient
    playing: float
    chance: random.Random
    viewers: list[Viewer] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    create_s: list[float] = field(default_factory=list)
    prompt_applied_s: list[float] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    """Refused requests by operation and status."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _acts: bool = True

    async def arrive(self, count: int, seconds: float) -> float:
        """Create `count` sessions at random times within `seconds`. Returns the rate of creation, 1/s."""
        began = time.monotonic()
        times = sorted(self.chance.uniform(0.0, seconds) for _ in range(count))
        creations = []
        for number, at in enumerate(times):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            creations.append(asyncio.create_task(self._create(number)))
        await asyncio.gather(*creations)
        return len(self.sessions) / (time.monotonic() - began)

    async def _create(self, number: int) -> None:
        plays = self.chance.random() < self.playing
        asked = time.monotonic()
        try:
            viewer = await Viewer.create(self.api, PROMPT, seed=number)
        except (ProblemError, httpx.HTTPError) as error:
            self._refuse("create", error)
            return
        self.create_s.append(time.monotonic() - asked)
        self.sessions.append(viewer.session)
        if plays:
            viewer.report_s = REPORT_S
            self.viewers.append(viewer)
            self._tasks.append(asyncio.create_task(viewer.watch()))
            self._tasks.append(asyncio.create_task(self._act(viewer)))

    async def _act(self, viewer: Viewer) -> None:
        while True:
            await asyncio.sleep(self.chance.expovariate(1.0 / ACTION_S))
            if not self._acts:
                return
            action = self.chance.choice(ACTIONS)
            try:
                if action == "prompt":
                    await self._prompt(viewer)
                elif action == "pause":
                    await viewer.pause()
                    await asyncio.sleep(self.chance.uniform(*PAUSE_S))
                    await viewer.resume()
                else:
                    await request(self.api, "POST", f"/v1/sessions/{viewer.session}/migrate", json={})
            except (ProblemError, httpx.HTTPError, TimeoutError) as error:
                self._refuse(action, error)

    async def _prompt(self, viewer: Viewer) -> None:
        switch = await viewer.submit(f"{PROMPT}, {self.chance.randrange(1_000)}")
        applied = await viewer.event("prompt.applied", APPLIED_LIMIT_S, prompt_id=switch.prompt_id)
        self.prompt_applied_s.append(applied["received_s"] - switch.submitted_s)

    def _refuse(self, action: str, error: Exception) -> None:
        why = error.status if isinstance(error, ProblemError) else type(error).__name__
        name = f"{action} {why}"
        self.refused[name] = self.refused.get(name, 0) + 1

    async def stop_acting(self) -> None:
        """Let no viewer act any more, and let them watch on."""
        self._acts = False

    async def end(self) -> None:
        """Close all viewers."""
        for task in self._tasks:
            await stop(task)

    @property
    def chunk_delivery_s(self) -> list[float]:
        """Seconds from a chunk's hand-over to the broker until it has arrived, for chunks that were awaited.

        Chunks from before the viewer's connection are left out.
        """
        return [
            chunk.received_at - chunk.published_at
            for viewer in self.viewers
            for chunk in viewer.chunks
            if chunk.published_at >= viewer.greeted_at
        ]

    @property
    def chunks(self) -> int:
        """Number of chunks that arrived."""
        return sum(len(viewer.chunks) for viewer in self.viewers)

    @property
    def chunks_lost(self) -> int:
        """Number of chunks that are missing between chunks that arrived, or that come before the first."""
        return sum(missing([chunk.index for chunk in viewer.chunks]) for viewer in self.viewers)

    @property
    def silent(self) -> int:
        """Number of watched sessions of which no chunk arrived."""
        return sum(not viewer.chunks for viewer in self.viewers)


def missing(indexes: list[int]) -> int:
    """Return how many chunks are missing up to the last of these."""
    return max(indexes, default=-1) + 1 - len(set(indexes))
