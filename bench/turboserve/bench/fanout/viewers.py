"""Viewers that only receive, in a process of their own: `python -m … URL SESSION COUNT SECONDS`.

Prints one JSON object: the delay of each chunk at each viewer, and what was missing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

SETTLE_S = 5.0
"""After the last viewer has connected, chunks are not counted for this long, seconds."""
AT_ONCE = 20
"""Handshakes at the same time."""


class Viewers:
    """All viewers of one run."""

    def __init__(self, url: str, session: str) -> None:
        self._url, self._session = url, session
        self._handshakes = asyncio.Semaphore(AT_ONCE)
        self.counting = False
        self.delays_s: list[float] = []
        self.connected = self.gaps = self.repeats = self.ended = 0

    async def watch(self) -> None:
        async with self._handshakes:
            socket = await connect(
                f"{self._url}/v1/sessions/{self._session}/stream", max_size=None, open_timeout=120
            )
            self.connected += 1
        last: int | None = None
        # A stream that the gateway ends, also for its load, is counted.
        async with socket:
            async for message in messages(socket):
                if isinstance(message, bytes) or '"type":"chunk"' not in message:
                    continue
                now_s, chunk = time.time(), json.loads(message)
                if self.counting:
                    self.delays_s.append(now_s - datetime.fromisoformat(chunk["published_at"]).timestamp())
                index: int = chunk["index"]
                if last is not None:
                    self.gaps += max(0, index - last - 1)
                    self.repeats += index <= last
                last = index
        self.ended += 1


async def messages(socket: ClientConnection) -> AsyncIterator[str | bytes]:
    """Yield what the socket receives until either side closes it, for whatever reason."""
    with suppress(ConnectionClosed):
        while True:
            yield await socket.recv()


async def main(url: str, session: str, count: int, seconds: float) -> None:
    viewers = Viewers(url, session)
    tasks = [asyncio.create_task(viewers.watch()) for _ in range(count)]
    while viewers.connected < count:
        await asyncio.sleep(0.1)
        for task in tasks:
            if task.done():
                task.result()
    await asyncio.sleep(SETTLE_S)
    # A pause of this process would be counted as a delay of the gateway.
    gc.collect()
    gc.freeze()
    viewers.counting = True
    print("counting", flush=True)
    await asyncio.sleep(seconds)
    viewers.counting = False
    found = {"delays_s": viewers.delays_s, "gaps": viewers.gaps, "repeats": viewers.repeats}
    print(json.dumps(found | {"ended": viewers.ended}), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
