"""What a worker needs to know of a session that was somewhere else before: the log's end and its latents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from torch import Tensor

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import UnavailableError
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service import metrics
from turboserve.worker.service.wire import LogEnd, Wire

RETRY_S = 0.2
PATIENCE_S = 10.0
"""A viewer waits this long at most for the latents; then the session goes on without its context."""

log = logs.get("takeover")

Wanted = Callable[[], bool]
"""Whether the answer is still waited for."""


class Takeover:
    """Asks until there is an answer."""

    def __init__(self, wire: Wire, config: ModelConfig, clock: Clock) -> None:
        self._wire, self._config, self._clock = wire, config, clock

    async def log_end(self, session: str, wanted: Wanted) -> LogEnd | None:
        """Where the log ends; None once nobody waits for it any more. Raises `UnreadableEntryError`."""
        while wanted():
            try:
                return await self._wire.log_end(session)
            except UnavailableError as error:
                log.warning("log not readable", session=session, error=error.detail)
                await asyncio.sleep(RETRY_S)
        return None

    async def latents(
        self, session: str, next_chunk: int, wanted: Wanted
    ) -> tuple[Tensor | None, Tensor | None]:
        """Clean latents of the newest chunks before `next_chunk`, up to the window, and those of the sink.

        [frames, C, H, W] each; None for what is lost.
        """
        config = self._config
        window = -(-config.window_frames // config.frames_per_chunk)
        deadline = self._clock.monotonic() + PATIENCE_S
        found: list[Tensor] = []
        for index in range(next_chunk - 1, max(-1, next_chunk - 1 - window), -1):
            latents = await self._ask(session, index, deadline, wanted)
            if latents is None:
                break
            found.insert(0, latents)
        if not found:
            metrics.takeovers.add(1, {"context": "lost"})
            log.warning("latents are lost: going on from empty context", session=session, chunk=next_chunk)
            return None, None
        sink = None
        if 0 < config.sink_size <= config.frames_per_chunk and next_chunk > len(found):
            first = await self._ask(session, 0, deadline, wanted)
            sink = None if first is None else first[: config.sink_size]
        whole = len(found) == min(window, next_chunk)
        metrics.takeovers.add(1, {"context": "whole" if whole else "partial"})
        log.info("session taken over", session=session, chunk=next_chunk, chunks_of_latents=len(found))
        return torch.cat(found), sink

    async def _ask(self, session: str, index: int, deadline: float, wanted: Wanted) -> Tensor | None:
        while wanted():
            try:
                return await self._wire.latents(session, index)
            except UnavailableError as error:
                if self._clock.monotonic() >= deadline:
                    return None
                log.warning("latents not readable", session=session, chunk=index, error=error.detail)
                await asyncio.sleep(RETRY_S)
        return None
