"""What a worker reads when it takes a session over: the latents of its newest chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import UnavailableError
from turboserve.telemetry_names import TAKEOVER
from turboserve.worker import metrics
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.engine_commands import FetchedContext
from turboserve.worker.service.quality import fidelity_from
from turboserve.worker.service.wire import RETRY_S, ConfigOf, Wanted, Wire

RETRY_TIMEOUT_S = 10.0
"""Longest wait of a viewer for the latents, seconds. Then the session continues without context."""

log = logs.get("wire")
T = TypeVar("T")


class Takeover:
    """Asks for kept latents until there is an answer."""

    def __init__(
        self, wire: Wire, config: ModelConfig, clock: Clock, config_of: ConfigOf | None = None
    ) -> None:
        """`config`, `config_of`: see `Wire`."""
        self._wire, self._clock = wire, clock
        self._config_of = config_of or (lambda _: config)

    async def latents(self, session: str, next_chunk: int, epoch: int, wanted: Wanted) -> FetchedContext:
        """Clean latents of the newest chunks before `next_chunk`, up to the window, and the sink's latents.

        `epoch`: epoch of chunk `next_chunk` - 1 in the log. 0: the log has lost that chunk, and only its
        latents name its epoch. With another value, only latents of chunks in the log are used. A fenced owner
        may have sent latents of a chunk that no viewer saw, and these remain where the rightful owner's were
        lost. Latents older than the first missing ones are not used.
        """
        config = self._config_of(session)
        window = -(-config.window_frames // config.frames_per_chunk)
        deadline = self._clock.monotonic() + RETRY_TIMEOUT_S
        found: list[Tensor] = []
        fidelities: list[Fidelity | None] = []
        for index in range(next_chunk - 1, max(-1, next_chunk - 1 - window), -1):
            kept = await self._ask(partial(self._wire.latents, session, index), deadline, wanted)
            if kept is None:
                break
            header, latents = kept
            if header.epoch != epoch and (epoch or found):
                metrics.stale_latents.add(1)
                log.warning(
                    "latents of a chunk that is not in the log",
                    session=session,
                    chunk=index,
                    epoch=header.epoch,
                )
                break
            found.insert(0, latents)
            fidelities.insert(0, fidelity_from(header.fidelity))
            epoch = header.epoch if index > header.began else header.before
        if not found:
            metrics.takeovers.add(1, {TAKEOVER: "lost"})
            log.warning("latents lost: continuing from an empty context", session=session, chunk=next_chunk)
            return FetchedContext()
        sink, sink_fidelity = None, None
        if 0 < config.sink_size <= config.frames_per_chunk and next_chunk > len(found):
            sink, sink_fidelity = await self._sink(session, deadline, wanted)
        whole = len(found) == min(window, next_chunk)
        metrics.takeovers.add(1, {TAKEOVER: "whole" if whole else "partial"})
        log.info("session taken over", session=session, chunk=next_chunk, chunks_of_latents=len(found))
        return FetchedContext(torch.cat(found), sink, tuple(fidelities), sink_fidelity)

    async def _sink(
        self, session: str, deadline: float, wanted: Wanted
    ) -> tuple[Tensor | None, Fidelity | None]:
        """Latents of the first frames and the configuration of chunk 0.

        The latents are None if they are lost, or if they belong to another chunk 0 than the log's.
        """
        kept = await self._ask(partial(self._wire.latents, session, 0), deadline, wanted)
        if kept is None:
            return None, None
        header, latents = kept
        epoch = await self._ask(partial(self._wire.first_epoch, session), deadline, wanted)
        if epoch not in (None, header.epoch):
            metrics.stale_latents.add(1)
            return None, None
        return latents[: self._config_of(session).sink_size], fidelity_from(header.fidelity)

    async def _ask(self, ask: Callable[[], Awaitable[T | None]], deadline: float, wanted: Wanted) -> T | None:
        """The answer. None: there is none, or none in time."""
        while wanted():
            try:
                return await ask()
            except UnavailableError as error:
                if self._clock.monotonic() >= deadline:
                    return None
                log.warning("latents not readable", error=error.detail)
                await asyncio.sleep(RETRY_S)
        return None
