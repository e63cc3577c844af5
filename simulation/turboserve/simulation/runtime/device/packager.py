"""Packages chunks on a virtual loop: an encoder that takes its declared time, and a queue with a timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.contents import INIT, ChunkContents, Latents
from turboserve.worker.engine.interface import ChunkReady
from turboserve.worker.media import EncodedChunk
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.packager import FromEngine, GeneratedChunk, ItemConverter, ToLoop


class VirtualEncoder:
    """See `packager.ChunkEncoder`. Returns a chunk's contents after the time that encoding takes."""

    latents_dtype = Latents.dtype

    def __init__(self, config: ModelConfig, seconds: float, clock: DeviceClock) -> None:
        self._config, self._seconds, self._clock = config, seconds, clock

    def encode(self, ready: ChunkReady, first_frame: int, fps: int) -> EncodedChunk:
        """See `ChunkEncoder.encode`."""
        self._clock.advance(self._seconds)
        shown: object = ready.frames
        assert isinstance(shown, Latents)
        return EncodedChunk(
            init=INIT,
            fragment=ChunkContents(shown.parent, shown.number).to_bytes(),
            codec="avc1.virtual",
            width=2,
            height=2,
            frames=self._config.pixel_frames(ready.index),
        )

    def latents(self, ready: ChunkReady) -> tuple[bytes, tuple[int, ...]]:
        """See `ChunkEncoder.latents`."""
        return _latents(ready).to_bytes(), Latents.shape


class VirtualPackager:
    """See `ports.Packager`."""

    def __init__(
        self,
        packager: ItemConverter,
        deliver: Callable[[ToLoop], None],
        loop: asyncio.AbstractEventLoop,
        clock: DeviceClock,
        seconds: float,
        limit: int,
    ) -> None:
        """Create a packager.

        Args:
            clock: The clock that the packager's encoder advances.
            seconds: Time of one chunk.
            limit: Number of waiting items above which the engine waits.
        """
        self._packager, self._deliver, self._loop, self._clock = packager, deliver, loop, clock
        self._seconds, self._limit = seconds, limit
        self._queue: deque[tuple[float, FromEngine]] = deque()
        """Waiting items, each with the time at which the packager has done it."""
        self._free_at = 0.0
        self._timer: asyncio.Handle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self.alive = False

    def start(self) -> None:
        """See `ports.Packager.start`."""
        self.alive = True

    def put(self, item: FromEngine) -> None:
        """Queue an item from the engine, in the engine's order."""
        self._free_at = max(self._free_at, self._loop.time())
        if isinstance(item, GeneratedChunk):
            self._free_at += self._seconds
        self._queue.append((self._free_at, item))
        self._empty.clear()
        if self._timer is None:
            self._timer = self._loop.call_at(self._queue[0][0], self._done)

    @property
    def room_at(self) -> float:
        """Time at which the engine may continue: at once, or when no more than the limit waits."""
        return self._queue[-self._limit][0] if len(self._queue) > self._limit else 0.0

    async def end(self, timeout_s: float) -> None:
        """See `ports.Packager.end`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return
        self.alive = False

    def _done(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._queue and self._queue[0][0] <= now:
            done_at, item = self._queue.popleft()
            # The encoder advances the clock to `done_at`.
            self._clock.now = done_at - self._seconds
            self._deliver(self._packager.convert(item))
        if not self._queue:
            self._empty.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._queue[0][0], self._done)


def _latents(ready: ChunkReady) -> Latents:
    latents: object = ready.latents
    assert isinstance(latents, Latents)
    return latents
