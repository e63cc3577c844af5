"""The worker's side of the bus: chunks through the fence, latents, the log's end."""

from __future__ import annotations

from dataclasses import dataclass

import nats
import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from turboserve import logs
from turboserve.bus import Bus, append, last_entry, next_entry
from turboserve.bus.log import Entry
from turboserve.clock import Clock
from turboserve.contracts.chunks import ChunkHeader, LatentsHeader
from turboserve.contracts.errors import FencedError, InvalidInputError, TurboServeError, UnavailableError
from turboserve.contracts.requests import GetLatents
from turboserve.ids import new_id
from turboserve.subjects import CHUNK, CHUNKS, GET_LATENTS, LATENTS, OWN
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.inputs import Outcome, Ownership
from turboserve.worker.service.stamped import Chunk

log = logs.get("wire")


class UnreadableEntryError(Exception):
    """The newest entry of a session's log is not a chunk: nobody can say where its video ends."""


@dataclass(frozen=True)
class LogEnd:
    """Where a session's chunk log ends."""

    next_chunk: int
    mine: bool
    epoch: int
    """Of the last entry; 0: there is none."""


class Wire:
    """Stateless: every call stands alone and can be repeated."""

    def __init__(self, bus: Bus, clock: Clock, worker: str, config: ModelConfig, chunk_ttl_s: int) -> None:
        self._bus, self._clock, self._worker = bus, clock, worker
        self._config, self._chunk_ttl_s = config, chunk_ttl_s
        self._nonce = new_id("msg")

    async def publish(self, chunk: Chunk, ownership: Ownership) -> Outcome:
        """Append once. UNKNOWN: append the same again until it is known."""
        epoch, revision = ownership
        packaged = chunk.packaged
        header = ChunkHeader(
            session=chunk.session,
            index=chunk.index,
            epoch=epoch,
            worker=self._worker,
            control_seq=chunk.control_seq,
            first_frame=chunk.first_frame,
            frames=packaged.frames,
            fps=chunk.fps,
            width=packaged.width,
            height=packaged.height,
            codec=packaged.codec,
            init_bytes=len(packaged.init),
            compute_s=chunk.compute_s,
            published_at=self._clock.wall(),
        )
        try:
            name = f"{chunk.session}:{chunk.index}"
            # Message ids are of the stream, not of a subject. One that was used on another subject, by
            # mistake or on purpose, would make the broker drop this chunk as a repetition of that.
            for message_id in (name, f"{name}:{self._nonce}"):
                ack = await append(
                    self._bus,
                    CHUNK.of(chunk.session),
                    packaged.init + packaged.fragment,
                    message_id=message_id,
                    headers=header.to_headers(),
                    expect=(OWN.of(chunk.session), revision),
                    ttl_s=self._chunk_ttl_s,
                )
                if not ack.duplicate:
                    return Outcome.ACKED
                entry = await next_entry(self._bus, CHUNKS, CHUNK.of(chunk.session), ack.sequence)
                if entry is not None and entry.sequence == ack.sequence:
                    break
        except FencedError:
            return Outcome.FENCED
        except UnavailableError as error:
            log.warning(
                "chunk not acknowledged", session=chunk.session, chunk=chunk.index, error=error.detail
            )
            return Outcome.UNKNOWN
        # Our own earlier attempt, or the chunk of an owner that was here before or after us.
        return Outcome.ACKED if entry is None or self._wrote(chunk.session, entry) else Outcome.FENCED

    async def send_latents(self, chunk: Chunk, epoch: int, began: int, before: int) -> None:
        """Best effort: without them a takeover goes on from empty context."""
        header = LatentsHeader(
            session=chunk.session,
            index=chunk.index,
            epoch=epoch,
            began=began,
            before=before,
            dtype=chunk.latents_dtype,
            shape=chunk.latents_shape,
            first_latent=chunk.index * self._config.frames_per_chunk,
        )
        try:
            await self._bus.publish(LATENTS, chunk.session, header, chunk.latents)
        except (nats.errors.Error, OSError) as error:
            log.warning("latents not sent", session=chunk.session, chunk=chunk.index, error=repr(error))

    async def log_end(self, session: str) -> LogEnd:
        """Raises `UnavailableError`, and `UnreadableEntryError`, which asking again does not change."""
        entry = await last_entry(self._bus, CHUNKS, CHUNK.of(session))
        if entry is None:
            return LogEnd(0, mine=False, epoch=0)
        try:
            header = ChunkHeader.of_entry(session, entry.headers, len(entry.data))
        except InvalidInputError as error:
            where = f"entry {entry.sequence} of {CHUNK.of(session)}"
            raise UnreadableEntryError(f"{where} has no readable header: {error.detail}") from None
        return LogEnd(header.index + 1, header.worker == self._worker, header.epoch)

    async def first_epoch(self, session: str) -> int | None:
        """Epoch of chunk 0; None: the log has dropped it. Raises `UnavailableError`."""
        entry = await next_entry(self._bus, CHUNKS, CHUNK.of(session), 1)
        try:
            header = None if entry is None else ChunkHeader.of_entry(session, entry.headers, len(entry.data))
        except InvalidInputError:
            return None
        return header.epoch if header is not None and header.index == 0 else None

    async def latents(self, session: str, index: int) -> tuple[LatentsHeader, Tensor] | None:
        """Clean latents of one chunk, [F, C, H, W]; None: not kept, or not this model's.

        Raises `UnavailableError`.
        """
        try:
            header, data = await self._bus.call_raw(GET_LATENTS, GetLatents(session=session, index=index))
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
        if len(data) != dtype.itemsize * int(np.prod(shape)):
            return None
        return header, torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    def _wrote(self, session: str, entry: Entry) -> bool:
        try:
            return ChunkHeader.of_entry(session, entry.headers, len(entry.data)).worker == self._worker
        except InvalidInputError:
            return False
