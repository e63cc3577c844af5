"""The decoder and the text encoder of virtual workers whose roles are apart, and what their homes wait with.

A chunk's frames say from which state they were decoded: `parent` of its latents if the decoder's cache is
that of the chunk before, or else the number in the cache. So frames of a wrong cache, or of another chunk,
show in the log.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import torch
from greenlet import greenlet
from torch import Tensor

from turboserve.simulation.runtime.device.blocking import BlockingCalls
from turboserve.simulation.runtime.device.contents import LOST, Latents, link
from turboserve.worker.engine.backend import Decoded, Decoding
from turboserve.worker.engine.decoding_apart import DecodingApart
from turboserve.worker.engine.streams import Job, Wakeup
from turboserve.worker.model.config import ModelConfig

J = TypeVar("J", bound=Job)
T = TypeVar("T")
BYTES = 8
"""Bytes of a packed number: the channels of packed latents."""
FRESH = -1
"""Number in a cache that has seen no chunk."""


def packed(latents: Latents) -> Tensor:
    """Return a chunk's latents as decode workers get them, uint8 [3, 8, 1, 1]."""
    return torch.frombuffer(bytearray(latents.to_bytes()), dtype=torch.uint8).view(-1, BYTES, 1, 1)


def packed_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of packed latents."""
    return replace(config, in_dim=BYTES)


def _numbers(tensor: Tensor) -> list[int]:
    """Return the three numbers in the first bytes of a tensor, of which each element is a byte."""
    first = tensor.reshape(-1)[: 3 * BYTES].to(torch.uint8)
    return [int(each) for each in first.contiguous().view(torch.int64).tolist()]


class VirtualDecoder:
    """See `interface.Decoder`. Latents are packed."""

    weight_bytes = workspace_bytes = 0
    cache_bytes = 1

    def __init__(self, config: ModelConfig, seconds: float, compute: Callable[[float], None]) -> None:
        """`seconds`: time of a chunk. `compute` lets time pass."""
        self._config, self._seconds, self._compute = config, seconds, compute

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """See `Decoder.decode`."""
        self._compute(self._seconds * len(latents))
        count, (width, height) = (
            self._config.pixel_frames(0 if caches is None else 1),
            self._config.frame_size,
        )
        frames = torch.zeros((len(latents), count, height, width, 3), dtype=torch.uint8)
        after: list[dict[str, Tensor]] = []
        for place, row in enumerate(latents):
            parent, number, index = _numbers(row)
            cache = FRESH if caches is None else int(caches[place]["number"])
            # A session that was recovered without its context continues from no state.
            continues = cache in (FRESH, parent) or parent == link(LOST, index)
            shown = torch.tensor([parent if continues else cache, number, index])
            frames[place].view(-1)[: 3 * BYTES] = shown.view(torch.uint8)
            after.append({"number": torch.tensor(number)})
        return frames, after


class VirtualDecodingApart(DecodingApart):
    """The worker's own decoding without caches, on packed latents."""

    def __call__(self, batch: Sequence[Decoding]) -> list[Decoded]:
        """See `Backend.decode`. The frames are the latents that they show."""
        jobs = [_with_tensors(each) for each in batch]
        return [
            Decoded(_shown(decoded.frames), each.item.latents, decoded.cache)
            for each, decoded in zip(batch, super().__call__(jobs), strict=True)
        ]


def _with_tensors(each: Decoding) -> Decoding:
    kept = tuple(packed(cast(Latents, one)) for one in each.context)
    item = replace(each.item, latents=packed(cast(Latents, each.item.latents)))
    return replace(each, item=item, context=kept)


def _shown(frames: Tensor) -> Tensor:
    return Latents(*_numbers(frames)).tensor if frames.numel() else frames


class DecodeThread(BlockingCalls):
    """The thread of a home's decode executor: it waits for decode workers while the engine computes."""

    def _switch(self, thread: greenlet) -> None:
        # The engine's clock may be ahead of the loop: at the end of the forward that is under way.
        ahead, self._clock.now = self._clock.now, self._loop.time()
        try:
            super()._switch(thread)
        finally:
            self._clock.now = ahead

    def wait_for(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, seconds: float) -> T:
        """See `ports.LoopWait`. Only within a call."""
        task = loop.create_task(work)
        task.add_done_callback(lambda _: self.wake())
        until = loop.time() + seconds
        while not task.done() and loop.time() < until:
            self.wait(until)
        if not task.done():
            task.cancel()
            raise TimeoutError
        if task.cancelled():
            raise concurrent.futures.CancelledError
        return task.result()

    def compute(self, seconds: float) -> None:
        """Let the time of a computation on this thread pass. Only within a call."""
        until = self._loop.time() + seconds
        while self._loop.time() < until:
            self.wait(until)


class WaitingExecutor(Generic[J]):
    """A stream executor (`backend.JobExecutor`) whose jobs wait for other workers."""

    threaded = True

    def __init__(self, thread: DecodeThread, loop: asyncio.AbstractEventLoop, wakeup: Wakeup) -> None:
        self._thread, self._loop, self._wakeup = thread, loop, wakeup
        self._jobs: deque[J] = deque()
        self._done: deque[J] = deque()
        self._busy = False
        self._failure: BaseException | None = None
        self.load = 0

    @property
    def finished(self) -> bool:
        """See `JobExecutor.finished`."""
        return self._failure is not None or bool(self._done)

    def submit(self, job: J) -> None:
        """See `JobExecutor.submit`."""
        self.load += 1
        self._jobs.append(job)
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._thread.run, self._work)

    def collect(self) -> list[J]:
        """See `JobExecutor.collect`."""
        if self._failure is not None:
            raise RuntimeError("a stream executor has failed") from self._failure
        done = list(self._done)
        self._done.clear()
        self.load -= len(done)
        return done

    def _work(self) -> None:
        while self._jobs and self._failure is None:
            job = self._jobs.popleft()
            try:
                job.run()
            except Exception as error:
                self._failure = error
            else:
                self._done.append(job)
            self._wakeup.notify_done()
        self._busy = False


def embedding_of(prompt: str, config: ModelConfig) -> Tensor:
    """Return the embedding of a prompt, [1, text_dim]: its digest."""
    return torch.full((1, config.text_dim), float(zlib.crc32(prompt.encode()) % (1 << 24)))


class VirtualTextEncoder:
    """See `interface.TextEncoder`."""

    weight_bytes = workspace_bytes = 0

    def __init__(
        self, config: ModelConfig, seconds: Callable[[int], float], compute: Callable[[float], None]
    ) -> None:
        """`seconds`: number of prompts → time. `compute` lets time pass."""
        self._config, self._seconds, self._compute = config, seconds, compute

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """See `TextEncoder.encode`."""
        self._compute(self._seconds(len(prompts)))
        return torch.stack([embedding_of(prompt, self._config) for prompt in prompts])
