"""`turboserve bench stream`: several people watch a running stack; what they saw, in numbers.

Each opens a session with a prompt of its own, plays it with a virtual player, changes the prompt half-way.
All times are of this machine's clock, so it has to be the one that the stack runs on.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from turboserve.bench.streaming.broker import BrokerTap
from turboserve.bench.streaming.measurement import Measurement, Watched
from turboserve.bench.streaming.viewer import ProblemError, Viewer

COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "cyan", "pink")
SHAPES = ("circle", "square", "triangle")
MOTIONS = ("left", "up", "right", "down")
FIRST_CHUNK_LIMIT_S = 60.0
APPLIED_LIMIT_S = 30.0


class NoStackError(Exception):
    """There is nothing to measure: no stack runs where it was looked for."""


@dataclass(frozen=True)
class Target:
    """A running stack. `nats_url` is a broker user that may read chunks; None: no baseline."""

    url: str
    nats_url: str | None = None

    @classmethod
    def find(cls, data: Path) -> Target:
        """The stack that `turboserve up` runs on the data directory `data`. Raises NoStackError."""
        try:
            record = json.loads((data / "stack.json").read_text())
            return cls(record["url"], record.get("nats_url"))
        except (OSError, ValueError, KeyError):
            raise NoStackError(
                f"no stack is running on {data.absolute()}: start one with `turboserve up`, or give its --url"
            ) from None


async def measure(target: Target, sessions: int, seconds: float) -> Measurement:
    """Watch `sessions` sessions for `seconds` each. Raises ProblemError, TimeoutError or OSError."""
    measurement = Measurement(seconds)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(httpx.AsyncClient(base_url=target.url))
        if target.nats_url is not None:
            tap = await stack.enter_async_context(BrokerTap(target.nats_url))
            measurement.broker_at = tap.received_at
        tasks = [asyncio.create_task(_watch(api, number, seconds)) for number in range(sessions)]
        try:
            measurement.watched = list(await asyncio.gather(*tasks))
        finally:
            # The first failure ends the run, and no session is left behind.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return measurement


def prompts(number: int) -> tuple[str, str]:
    """The two prompts of session `number`; neighbours differ in everything."""
    colour, after = COLOURS[number % 8], COLOURS[(number + 3) % 8]
    return (
        f"a {colour} {SHAPES[number % 3]} moving {MOTIONS[number % 4]}",
        f"a {after} {SHAPES[(number + 1) % 3]} moving {MOTIONS[(number + 1) % 4]}",
    )


async def _watch(api: httpx.AsyncClient, number: int, seconds: float) -> Watched:
    first, second = prompts(number)
    asked_s = time.monotonic()
    viewer = await Viewer.create(api, first, seed=number)
    try:
        one = Watched(viewer, asked_s)
        async with viewer.watching():
            await viewer.until(
                lambda: viewer.connections > 0 and viewer.last >= 0, FIRST_CHUNK_LIMIT_S, "chunk"
            )
            begun_s = time.monotonic()
            await asyncio.sleep(seconds / 2)
            one.switch = await viewer.submit(second)
            applied = await viewer.event("prompt.applied", APPLIED_LIMIT_S, event_id=one.switch.event_id)
            one.applied_s, one.applied_chunk = applied["received_s"], applied["chunk_index"]
            while (left_s := begun_s + seconds - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, 0.02))
                _note_visible(one)
            viewer.player.tick(time.monotonic())
        return one
    finally:
        await viewer.delete()


def _note_visible(one: Watched) -> None:
    player = one.viewer.player
    now_s = time.monotonic()
    player.tick(now_s)
    if one.visible_s is None:
        for chunk in reversed(one.viewer.chunks):
            if chunk.index == one.applied_chunk and player.position_s >= chunk.start_s:
                one.visible_s = now_s


def explain(error: Exception) -> str:
    """What to tell a person when a run could not be made."""
    if isinstance(error, ProblemError) and error.status == 429:
        return f"{error}: start the stack with more workers, or measure fewer sessions"
    return str(error) or type(error).__name__
