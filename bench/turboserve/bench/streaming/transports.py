"""WebSocket and WebRTC beside each other: from a prompt to its first pixel, and what a viewer costs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import psutil

from turboserve.bench.report import percentile
from turboserve.bench.streaming.added_viewers import added_costs
from turboserve.bench.streaming.rest import LIMITS
from turboserve.bench.streaming.viewer import Viewer
from turboserve.bench.streaming.whep import WhepViewer

PROMPT_EVERY_S = 4.0
FIRST_S = 60.0
SEEN_S = 30.0
SETTLE_S = 3.0
LOOK_S = 0.002
"""Interval at which a viewer's screen is looked at, seconds."""
_SCHEDULER_CLOCK = 2
"""Kind of a process's clock. Source: clock_getcpuclockid(3), linux/posix-timers_types.h."""
COLOURS = ("red", "blue", "green", "yellow")

Seen = Callable[[str], Awaitable[float]]
"""Waits until a prompt is on the screen. Returns when it was, monotonic seconds."""


async def compare(
    url: str,
    gateway_pid: int | None,
    transports: tuple[str, ...],
    sessions: int,
    seconds: float,
    lead_s: float,
    added: int = 0,
) -> dict[str, Any]:
    """Watch `sessions` new sessions over each transport in turn, for `seconds` each.

    `lead_s`: the sessions' `max_lead_s`. `added`: see `added_costs`; 0: that is not measured. Raises
    ProblemError, TimeoutError or OSError.
    """
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, timeout=30.0, limits=LIMITS) as api:
        for transport in transports:
            found[transport] = await _block(api, gateway_pid, transport, sessions, seconds, lead_s)
    if added:
        costs: dict[str, float] = {}
        if gateway_pid is not None:
            used_s = partial(processor_time_s, psutil.Process(gateway_pid))
            costs = await added_costs(url, used_s, transports, sessions, added, seconds, lead_s)
        for transport in transports:
            found[transport]["gateway_cpu_per_added_us"] = costs.get(transport)
    return {
        "sessions": sessions,
        "seconds": seconds,
        "lead_s": lead_s,
        "added": added,
        "transports": found,
        "webrtc_to_websocket": ratios(found),
    }


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the gateway's processor time over WebRTC divided by that over WebSocket. None: not measured."""
    both = found.get("whep", {}), found.get("ws", {})
    compared: dict[str, float | None] = {}
    for name, key in (("viewer", "gateway_cpu_per_viewer_us"), ("added", "gateway_cpu_per_added_us")):
        over_webrtc, over_websocket = (one.get(key) for one in both)
        if over_webrtc is None or over_websocket is None or over_websocket <= 0.0:
            compared[name] = None
        else:
            compared[name] = round(over_webrtc / over_websocket, 2)
    return compared


async def _block(
    api: httpx.AsyncClient,
    gateway_pid: int | None,
    transport: str,
    sessions: int,
    seconds: float,
    lead_s: float,
) -> dict[str, Any]:
    process = None if gateway_pid is None else psutil.Process(gateway_pid)
    ready = asyncio.Barrier(sessions + 1)
    watching = [
        asyncio.create_task(_watch(api, transport, number, seconds, lead_s, ready))
        for number in range(sessions)
    ]
    # The first failure ends the run.
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({waiting, *watching}, return_when=asyncio.FIRST_COMPLETED)
        before, began = processor_time_s(process), time.monotonic()
        delays = await asyncio.gather(*watching)
        spent, took = processor_time_s(process) - before, time.monotonic() - began
    finally:
        for task in (waiting, *watching):
            task.cancel()
        await asyncio.gather(waiting, *watching, return_exceptions=True)
    every = [delay for some in delays for delay in some]
    return {
        "prompts": len(every),
        "prompt_seen_s": {f"p{share}": percentile(every, share / 100) for share in (50, 95, 100)},
        "gateway_cpu_per_viewer_us": None if process is None else round(spent / took / sessions * 1e6, 1),
    }


def processor_time_s(process: psutil.Process | None) -> float:
    """Return the processor time of a process so far, seconds."""
    if process is None:
        return 0.0
    if sys.platform != "linux":
        times = process.cpu_times()
        return float(times.user + times.system)
    # psutil rounds to 0.02 s, what a viewer costs in half a minute.
    return time.clock_gettime(~process.pid << 3 | _SCHEDULER_CLOCK)


async def _watch(
    api: httpx.AsyncClient, transport: str, number: int, seconds: float, lead_s: float, ready: asyncio.Barrier
) -> list[float]:
    """Watch one session, and change its prompt every few seconds. Returns the time to each one's pixels."""
    viewer = await Viewer.create(api, f"a {COLOURS[0]} circle", seed=number, max_lead_s=lead_s)
    delays: list[float] = []
    try:
        async with _screen(api, viewer, transport) as seen:
            # Neighbors' prompts are spread over the interval between two of them.
            await asyncio.sleep(SETTLE_S + number * 0.31)
            await ready.wait()
            ends_s = time.monotonic() + seconds
            for turn in range(1, round(seconds / PROMPT_EVERY_S) + 1):
                prompt = f"a {COLOURS[turn % len(COLOURS)]} circle"
                switch = await viewer.submit(prompt, drop_buffer=True)
                delays.append(await seen(switch.prompt_id) - switch.submitted_s)
                # No fixed phase between prompts and chunks.
                await asyncio.sleep(PROMPT_EVERY_S - 1.0 + 0.37 * (turn % 4))
            await asyncio.sleep(max(0.0, ends_s - time.monotonic()))
        return delays
    finally:
        await viewer.delete()


@asynccontextmanager
async def _screen(api: httpx.AsyncClient, viewer: Viewer, transport: str) -> AsyncIterator[Seen]:
    """Watch over the transport once the first frame is there."""
    if transport == "ws":
        async with viewer.watching():
            await viewer.until(lambda: viewer.last >= 0, FIRST_S, "chunk")
            yield lambda prompt_id: _played(viewer, prompt_id)
        return
    async with WhepViewer(api, viewer.session) as over_webrtc:
        await _until(lambda: over_webrtc.frames or None, FIRST_S)
        yield lambda prompt_id: _until(lambda: over_webrtc.seen_s(prompt_id), SEEN_S)


async def _played(viewer: Viewer, prompt_id: str) -> float:
    """Wait until the virtual player is at the first chunk under the prompt."""
    applied = await viewer.event("prompt.applied", SEEN_S, prompt_id=prompt_id)

    def look() -> float | None:
        now_s = time.monotonic()
        viewer.player.tick(now_s)
        for chunk in reversed(viewer.chunks):
            if chunk.index == applied["chunk_index"] and viewer.player.position_s >= chunk.start_s:
                return now_s
        return None

    seen_s: float = await _until(look, SEEN_S)
    return seen_s


async def _until(look: Callable[[], Any], limit_s: float) -> Any:
    async with asyncio.timeout(limit_s):
        while (found := look()) is None:
            await asyncio.sleep(LOOK_S)
    return found
