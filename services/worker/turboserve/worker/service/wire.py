"""The worker's side of the bus: chunks through the fence, latents, and what a takeover of a session reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TypeVar

import nats
import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from turboserve import logs
from turboserve.bus import Bus, Owners, append
from turboserve.clock import Clock
from turboserve.contracts.chunks import ChunkHeader, LatentsHeader
from turboserve.contracts.errors import FencedError, TurboServeError, UnavailableError
from turboserve.contracts.requests import GetLatents
from turboserve.ids import random_token
from turboserve.subjects import CHUNK, GET_LATENTS, LATENTS, OWN
from turboserve.telemetry_names import TAKEOVER
from turboserve.worker import metrics
from turboserve.worker.engine.errors import InvalidFidelityError
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.events import LogPlace, Ownership, PublishOutcome
from turboserve.worker.service.packager import PackagedChunk
from turboserve.worker.service.quality import fidelity_from, session_slack

RETRY_S = 0.2
RETRY_TIMEOUT_S = 10.0
"""Longest wait of a viewer for the latents, seconds. Then the session continues without context."""

log = logs.get("wire")
T = TypeVar("T")

Wanted = Callable[[], bool]
"""Whether the answer is still wanted."""


@dataclass(frozen=True, eq=False)
class FetchedContext:
    """What remains of a session's newest chunks. None for what is lost."""

    latents: Tensor | None = None
    """Clean latents of consecutive chunks, the oldest first, [frames, C, H, W]."""
    sink: Tensor | None = None
    """Clean latents of the session's first frames, [sink_size, C, H, W]."""
    fidelities: tuple[Fidelity | None, ...] = ()
    """Configuration of each chunk of `latents`."""
    sink_fidelity: Fidelity | None = None
    """Configuration of chunk 0, if `sink` is given."""


@dataclass(frozen=True)
class LogEnd:
    """Where a session's chunk log ends."""

    next_chunk: int
    mine: bool
    epoch: int
    """Epoch of the last entry; 0 if there is none."""
    contiguous_from: int = 0
    """`contiguous_from` of the last entry; 0 if there is none."""
    sequence: int = 0
    """Stream sequence of the last entry; 0 if there is none."""
    known_lost: bool = False
    """Whether the log does not have the chunk that was asked for."""
    control_seq: int = 0
    """`control_seq` of the last entry; 0 if there is none."""


class Wire:
    """Requests to the broker and the hot store. Every call stands alone and can be repeated."""

    def __init__(self, bus: Bus, clock: Clock, worker: str, config: ModelConfig, chunk_ttl_s: int) -> None:
        self._bus, self._clock, self._worker = bus, clock, worker
        self._config, self._chunk_ttl_s = config, chunk_ttl_s
        self._owners = Owners(bus, lambda: metrics.foreign_chunks.add(1))
        self._secret = bytes.fromhex(random_token(32))

    async def publish(
        self,
        chunk: PackagedChunk,
        ownership: Ownership,
        began: int,
        contiguous_from: int = 0,
        *,
        drops_buffer: bool = False,
    ) -> tuple[PublishOutcome, int, bool]:
        """Append once. Returns the outcome, the stream sequence of a chunk that is in the log, and whether it
        was there already, with the header of an earlier attempt.

        UNKNOWN: repeat the append until the outcome is known.

        `began`, `contiguous_from` and `drops_buffer`: see `ChunkHeader`.
        """
        epoch, revision = ownership
        packaged = chunk.packaged
        slack = None
        if chunk.playout is not None:
            measured_s, left = chunk.playout
            slack = session_slack(left.after(self._clock.monotonic() - measured_s))
        header = ChunkHeader(
            session=chunk.session,
            index=chunk.index,
            epoch=epoch,
            began=began,
            contiguous_from=contiguous_from,
            worker=self._worker,
            control_seq=chunk.control_seq,
            drops_buffer=drops_buffer,
            first_frame=chunk.first_frame,
            frames=packaged.frames,
            fps=chunk.fps,
            width=packaged.width,
            height=packaged.height,
            codec=packaged.codec,
            init_bytes=len(packaged.init),
            compute_s=chunk.compute_s,
            fidelity=chunk.fidelity,
            slack_s=None if slack is None else slack.slack_s,
            credit_s=None if slack is None else slack.credit_s,
            tier=None if slack is None else slack.tier,
            published_at=self._clock.wall(),
        )
        try:
            ack = await append(
                self._bus,
                CHUNK.by(chunk.session, self._worker),
                packaged.init + packaged.fragment,
                message_id=self._message_id(chunk.session, chunk.index, epoch),
                headers=header.to_headers(),
                expect=(OWN.of(chunk.session), revision),
                ttl_s=self._chunk_ttl_s,
            )
        except FencedError:
            return PublishOutcome.FENCED, 0, False
        except UnavailableError as error:
            log.warning(
                "chunk not acknowledged", session=chunk.session, chunk=chunk.index, error=error.detail
            )
            return PublishOutcome.UNKNOWN, 0, False
        # A broker that already has the message has it from this process: no other process knows the message
        # id.
        return PublishOutcome.ACKED, ack.sequence, ack.duplicate

    async def send_latents(self, chunk: PackagedChunk, epoch: int, began: int, before: int) -> None:
        """Send the latents, best effort. Without them a takeover continues from an empty context."""
        header = LatentsHeader(
            session=chunk.session,
            index=chunk.index,
            epoch=epoch,
            worker=self._worker,
            began=began,
            before=before,
            dtype=chunk.latents_dtype,
            shape=chunk.latents_shape,
            first_latent=chunk.index * self._config.frames_per_chunk,
            fidelity=chunk.fidelity,
        )
        try:
            await self._bus.publish(LATENTS, self._worker, header, chunk.latents)
        except (nats.errors.Error, OSError) as error:
            log.warning("latents not sent", session=chunk.session, chunk=chunk.index, error=repr(error))

    async def log_end(self, session: str, known: LogPlace | None = None) -> LogEnd:
        """Where the log ends, counting only entries that owners wrote. Raises `UnavailableError`.

        `known`: place of a chunk that was in the log. Its absence shows that the log has lost its end since.
        """
        self._owners.changed(session)
        known_lost = False
        if known is not None:
            still = await self._owners.first(session, known[1])
            known_lost = still is None or (still[0].index, still[1].sequence) != known
        found = await self._owners.newest(session)
        if found is None:
            return LogEnd(0, mine=False, epoch=0, known_lost=known_lost)
        header, entry = found
        return LogEnd(
            header.index + 1,
            header.worker == self._worker,
            header.epoch,
            header.contiguous_from,
            entry.sequence,
            known_lost,
            header.control_seq,
        )

    async def first_epoch(self, session: str) -> int | None:
        """Epoch of chunk 0. None: the log has dropped it. Raises `UnavailableError`."""
        found = await self._owners.first(session, 1)
        return found[0].epoch if found is not None and found[0].index == 0 else None

    async def latents(self, session: str, index: int) -> tuple[LatentsHeader, Tensor] | None:
        """Clean latents of one chunk, [F, C, H, W]. None: not kept, or not of this model.

        Raises `UnavailableError`.
        """
        request = GetLatents(session=session, index=index, worker=self._worker)
        try:
            header, data = await self._bus.call_raw(GET_LATENTS, request)
        except UnavailableError:
            raise
        except (TurboServeError, ValidationError):
            return None
        dtype = getattr(torch, header.dtype, None)
        shape = self._config.latent_shape
        if not isinstance(dtype, torch.dtype) or tuple(header.shape) != shape or header.index != index:
            return None
        if header.first_latent != index * self._config.frames_per_chunk:
            return None
        try:
            if (fidelity := fidelity_from(header.fidelity)) is not None:
                fidelity.check(self._config)
        except InvalidFidelityError:
            return None
        if len(data) != dtype.itemsize * int(np.prod(shape)):
            return None
        return header, torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    def _message_id(self, session: str, index: int, epoch: int) -> str:
        """Message id of one chunk of this process, the same for each attempt.

        The broker drops a message with a known id anywhere in the stream. The id is therefore a secret until
        it is used.
        """
        name = f"{session}:{index}:{self._worker}:{epoch}"
        return f"{name}:{blake2b(name.encode(), key=self._secret, digest_size=16).hexdigest()}"


class Takeover:
    """Queries until there is an answer."""

    def __init__(self, wire: Wire, config: ModelConfig, clock: Clock) -> None:
        self._wire, self._config, self._clock = wire, config, clock

    async def log_end(self, session: str, known: LogPlace | None, wanted: Wanted) -> LogEnd | None:
        """Where the log ends; None once the answer is not wanted any more. `known`: as `Wire.log_end`."""
        while wanted():
            try:
                return await self._wire.log_end(session, known)
            except UnavailableError as error:
                log.warning("log not readable", session=session, error=error.detail)
                await asyncio.sleep(RETRY_S)
        return None

    async def latents(self, session: str, next_chunk: int, epoch: int, wanted: Wanted) -> FetchedContext:
        """Clean latents of the newest chunks before `next_chunk`, up to the window, and the sink's latents.

        `epoch`: epoch of chunk `next_chunk` - 1 in the log. 0: the log has lost that chunk, and only its
        latents name its epoch. With another value, only latents of chunks in the log are used. A fenced owner
        may have sent latents of a chunk that no viewer saw, and these remain where the rightful owner's were
        lost. Latents older than the first missing ones are not used.
        """
        config = self._config
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
        return latents[: self._config.sink_size], fidelity_from(header.fidelity)

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
