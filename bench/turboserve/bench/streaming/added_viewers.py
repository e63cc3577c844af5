"""What one more viewer costs the gateway: its processor time with added viewers, less that without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median

import httpx

from turboserve.bench.streaming.rest import LIMITS
from turboserve.bench.streaming.viewer import Viewer
from turboserve.bench.streaming.whep import WhepViewer

FIRST_S = 60.0
SETTLE_S = 2.0
ROUNDS = 3
LOOK_S = 0.05


async def added_costs(
    url: str,
    used_s: Callable[[], float],
    transports: tuple[str, ...],
    sessions: int,
    added: int,
    seconds: float,
    lead_s: float,
) -> dict[str, float]:
    """Return the processor time per second of an added viewer, µs, by transport.

    Each of `sessions` sessions has one viewer over WebSocket throughout. In `ROUNDS` rounds, the gateway
    works for `seconds` with `added` more of each session over each transport, in turn. Before and after, it
    works as long without them: other work on the machine changes what the gateway takes. `used_s`: the
    processor time of the gateway so far. Raises ProblemError, TimeoutError or OSError.
    """
    rates: dict[str, list[float]] = {name: [] for name in transports}
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30.0, limits=LIMITS))
        keepers = []
        for number in range(sessions):
            keeper = await Viewer.create(api, "a red circle moving left", seed=number, max_lead_s=lead_s)
            stack.push_async_callback(keeper.delete)
            await stack.enter_async_context(keeper.watching())
            keepers.append(keeper)
        for keeper in keepers:
            await keeper.until(partial(_plays, keeper), FIRST_S, "chunk")
        watched = [keeper.session for keeper in keepers for _ in range(added)]
        before = await _rate(used_s, seconds)
        for name in transports * ROUNDS:
            async with _viewers(api, name, watched):
                rate = await _rate(used_s, seconds)
            # The ends of connections are no part of what follows.
            await asyncio.sleep(SETTLE_S)
            after = await _rate(used_s, seconds)
            rates[name].append(rate - (before + after) / 2)
            before = after
    return {name: round(median(some) / len(watched) * 1e6, 1) for name, some in rates.items()}


async def _rate(used_s: Callable[[], float], seconds: float) -> float:
    """Return the processor time per second during the next `seconds`."""
    before_s, began_s = used_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (used_s() - before_s) / (time.monotonic() - began_s)


def _plays(viewer: Viewer | WhepViewer) -> bool:
    return bool(viewer.frames if isinstance(viewer, WhepViewer) else viewer.chunks)


@asynccontextmanager
async def _viewers(api: httpx.AsyncClient, transport: str, sessions: Sequence[str]) -> AsyncIterator[None]:
    """Watch with one viewer per entry of `sessions`, once all have video."""
    async with AsyncExitStack() as stack:
        started: list[Callable[[], bool]] = []
        for session in sessions:
            if transport == "ws":
                viewer = Viewer(api, session)
                await stack.enter_async_context(viewer.watching())
                started.append(partial(_plays, viewer))
            else:
                over_webrtc = await stack.enter_async_context(WhepViewer(api, session))
                started.append(partial(_plays, over_webrtc))
        async with asyncio.timeout(FIRST_S):
            while not all(one() for one in started):
                await asyncio.sleep(LOOK_S)
        await asyncio.sleep(SETTLE_S)
        yield
