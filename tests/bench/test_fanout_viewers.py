"""The viewers of the fan-out benchmark, on a server that ends some of their streams."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime

from websockets.asyncio.server import ServerConnection, serve

from turboserve.bench.fanout.viewers import Viewers

BUSY = 1013


async def test_a_stream_that_the_gateway_ends_is_counted_and_the_others_continue() -> None:
    """Incident: at 500 viewers, one that the gateway refused for its load ended the benchmark."""
    waiting = 0

    async def stream(socket: ServerConnection) -> None:
        nonlocal waiting
        waiting += 1
        for index in (0, 1, 3):
            published = datetime.now(UTC).isoformat()
            message = {"type": "chunk", "index": index, "published_at": published}
            await socket.send(json.dumps(message, separators=(",", ":")))
        if waiting == 1:
            await socket.close(BUSY, "Unavailable")
        else:
            await socket.wait_closed()

    async with serve(stream, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        viewers = Viewers(f"ws://127.0.0.1:{port}", "ses_1")
        viewers.counting = True
        first = asyncio.create_task(viewers.watch())
        await first
        second = asyncio.create_task(viewers.watch())
        async with asyncio.timeout(60):
            while len(viewers.delays_s) < 6:
                await asyncio.sleep(0.01)
        assert (viewers.connected, viewers.ended, viewers.gaps, viewers.repeats) == (2, 1, 2, 0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
