"""Real clients that watch, prompt, pause, resume, migrate and reconnect during faults."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from turboserve.bench.stream import prompts
from turboserve.bench.streaming.problems import ProblemError
from turboserve.bench.streaming.received import Received
from turboserve.bench.streaming.rest import request
from turboserve.bench.streaming.viewer import Viewer
from turboserve.experiments.chaos.chunklog import digest_of
from turboserve.experiments.chaos.user_actions import UserAction, UserActionKind

RETRY_TIMEOUT_S = 90.0
"""Time for which an action that must succeed in the end is retried."""
RETRY_S = 0.5
BUFFER_S = 3.0
"""Video with which a client that knows several gateways starts: the shipped lead of a worker, seconds."""
LIMITS: tuple[Mapping[str, Any], ...] = (
    {"max_lead_s": 0.75},
    {"quality": {"pin": True}},
    {"quality": {"floor": 0.9}, "max_lead_s": 6.0},
    {"quality": None, "max_lead_s": None},
)
"""What a client changes of its session, in turn."""
TRANSIENT_ERRORS = (ProblemError, httpx.HTTPError, OSError, TimeoutError)


class SimulatedClient:
    """One session's client."""

    def __init__(self, number: int, viewer: Viewer) -> None:
        self.number, self.viewer = number, viewer
        self.seen: list[tuple[int, str]] = []
        self.arrivals: list[float] = []
        """Monotonic times at which new chunks arrived."""
        self.paused = False
        self.pauses: list[tuple[float, float]] = []
        """Monotonic times from the request to pause until the request to resume was accepted."""
        self.done: Counter[str] = Counter()
        """Accepted actions by kind; `KIND refused` counts the others."""
        viewer.on_chunk = self._got

    @classmethod
    async def begin(
        cls, number: int, api: httpx.AsyncClient, gateways: Sequence[str] = ()
    ) -> SimulatedClient:
        """Open a session, with retries. With several `gateways`, the client leaves a silent one."""
        viewer = await with_retry(
            lambda: Viewer.create(api, prompts(number)[0], keep_video=True, seed=number)
        )
        if len(gateways) > 1:
            viewer.gateways = tuple(gateways)
            viewer.player.start_buffer_s = BUFFER_S
        return cls(number, viewer)

    def _got(self, chunk: Received) -> None:
        self.seen.append((chunk.index, digest_of(chunk.fragment)))
        self.arrivals.append(time.monotonic())
        # The digest is kept, the video is not: a long run would fill the memory with it.
        self.viewer.chunks[:-1] = []

    async def live(self, actions: Sequence[UserAction], began_s: float) -> None:
        for action in actions:
            await asyncio.sleep(max(began_s + action.at_s - time.monotonic(), 0.0))
            try:
                await self._do(action)
                self.done[action.kind.value] += 1
            except TRANSIENT_ERRORS:
                self.done[f"{action.kind.value} refused"] += 1

    async def _do(self, action: UserAction) -> None:
        match action.kind:
            case UserActionKind.PROMPT:
                await self.viewer.submit(prompts(self.number + int(action.at_s))[1])
            case UserActionKind.DROP:
                prompt = prompts(self.number + int(action.at_s))[1]
                await self.viewer.submit(prompt, drop_buffer=True)
            case UserActionKind.CHANGE:
                limits = LIMITS[int(action.at_s) % len(LIMITS)]
                await request(
                    self.viewer.api, "PATCH", f"/v1/sessions/{self.viewer.session}", json=dict(limits)
                )
            case UserActionKind.MIGRATE:
                path = f"/v1/sessions/{self.viewer.session}/migrate"
                await request(self.viewer.api, "POST", path)
            case UserActionKind.CUT:
                await self.viewer.drop_connection()
            case UserActionKind.PAUSE:
                await self._pause(action.seconds)

    async def _pause(self, seconds: float) -> None:
        self.paused = True
        self.pauses.append((time.monotonic(), float("inf")))
        try:
            # A request whose answer was lost may have taken effect, so the session is resumed in any case.
            await self.viewer.pause()
            await asyncio.sleep(seconds)
        finally:
            await self.resume()

    async def resume(self) -> None:
        """Request to resume until the request succeeds."""

        async def once() -> None:
            try:
                await self.viewer.resume()
            except ProblemError as problem:
                # The session was not paused, or plays already.
                if problem.status != 409:
                    raise
            self.viewer.player.pause(False, time.monotonic())

        await with_retry(once)
        self.paused = False
        if self.pauses and self.pauses[-1][1] == float("inf"):
            self.pauses[-1] = (self.pauses[-1][0], time.monotonic())

    async def watch(self) -> None:
        """Watch until the session ends. If a gateway refuses the stream, try again, as users do."""
        while self.viewer.ended is None:
            try:
                await self.viewer.watch()
            except ProblemError:
                self.done["stream refused"] += 1
                await asyncio.sleep(RETRY_S)

    def stall_s(self, now_s: float) -> float:
        """Return the total time for which the video has stalled by `now_s`, monotonic seconds."""
        self.viewer.player.tick(now_s)
        return self.viewer.player.stall_s

    def wait_after(self, at_s: float) -> float | None:
        """Return the seconds from `at_s` to the next chunk; None if the session was paused or got none."""
        later = next((arrival for arrival in self.arrivals if arrival > at_s), None)
        if later is None or any(begin < later and end > at_s for begin, end in self.pauses):
            return None
        return later - at_s

    async def end(self) -> None:
        with suppress(*TRANSIENT_ERRORS):
            await self.viewer.delete()


async def with_retry(work: Callable[[], Awaitable[Any]], limit_s: float = RETRY_TIMEOUT_S) -> Any:
    """Retry until it works. After `limit_s`, raises the last error."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return await work()
        except TRANSIENT_ERRORS:
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(RETRY_S)
