"""The worker's side of the bus: chunks through the fence, latents, and what a takeover of a session reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import nats
import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from turboserve import logs
from turboserve.bus import Bus, Owners, append, next_entry
from turboserve.clock import Clock
from turboserve.contracts.chunks import ChunkHeader, ChunkStages, LatentsHeader
from turboserve.contracts.errors import FencedError, TurboServeError, UnavailableError
from turboserve.contracts.requests import GetLatents
from turboserve.ids import random_token
from turboserve.subjects import CHUNK, CHUNKS, GET_LATENTS, LATENTS, OWN
from turboserve.worker import metrics
from turboserve.worker.engine.errors import InvalidFidelityError
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service.events import LogPlace, Ownership, PublishOutcome
from turboserve.worker.service.packager import PackagedChunk
from turboserve.worker.service.quality import TIERS, bounded, fidelity_from

RETRY_S = 0.2

log = logs.get("wire")

Wanted = Callable[[], bool]
"""Whether the answer is still wanted."""


ConfigOf = Callable[[str], ModelConfig]
"""Session → the model that it runs on."""


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

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        worker: str,
        config: ModelConfig,
        chunk_ttl_s: int,
        config_of: ConfigOf | None = None,
        config_of_class: ConfigOf | None = None,
    ) -> None:
        """`config_of`: session → its model, where the worker serves several. None: `config` for all.
        `config_of_class`: the same by the name of a class. A session that has left has no model here."""
        self._bus, self._clock, self._worker = bus, clock, worker
        self._config_of_class = config_of_class or (lambda _: config)
        self._config_of, self._chunk_ttl_s = config_of or (lambda _: config), chunk_ttl_s
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
        now = self._clock.monotonic()
        left = None if chunk.playout is None else chunk.playout[1].after(now - chunk.playout[0])
        fields: dict[str, object] = {
            "session": chunk.session,
            "index": chunk.index,
            "epoch": epoch,
            "began": began,
            "contiguous_from": contiguous_from,
            "worker": self._worker,
            "control_seq": chunk.control_seq,
            "drops_buffer": drops_buffer,
            "first_frame": chunk.first_frame,
            "frames": packaged.frames,
            "fps": chunk.fps,
            "width": packaged.width,
            "height": packaged.height,
            "codec": packaged.codec,
            "init_bytes": len(packaged.init),
            "compute_s": chunk.compute_s,
            "fidelity": chunk.fidelity,
            "slack_s": None if left is None else bounded(left.slack_s),
            "credit_s": None if left is None else bounded(left.credit_s),
            "tier": None if left is None else TIERS[left.tier],
            "published_at": self._clock.wall(),
            "stages": stages_of(chunk, now),
        }
        header = ChunkHeader.of_fields(fields)
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
            first_latent=chunk.index * self._config_of_class(chunk.model).frames_per_chunk,
            fidelity=chunk.fidelity,
        )
        try:
            await self._bus.publish(LATENTS, self._worker, header, chunk.latents)
        except (nats.errors.Error, OSError) as error:
            log.warning("latents not sent", session=chunk.session, chunk=chunk.index, error=repr(error))

    async def reaches(self, sequence: int) -> bool:
        """Whether the replica of the log that answers has what was appended up to `sequence`.

        A replica may lag, above all one whose server was frozen. A broker's server answers reads itself if it
        has a replica, so the reads that follow over this connection go to the same one. Raises
        `UnavailableError`.
        """
        return sequence == 0 or await next_entry(self._bus, CHUNKS, ">", sequence) is not None

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
        config = self._config_of(session)
        shape = config.latent_shape
        if not isinstance(dtype, torch.dtype) or tuple(header.shape) != shape or header.index != index:
            return None
        if header.first_latent != index * config.frames_per_chunk:
            return None
        try:
            if (fidelity := fidelity_from(header.fidelity)) is not None:
                fidelity.check(config)
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


def stages_of(chunk: PackagedChunk, now_s: float) -> ChunkStages:
    """Return the ages of a chunk's stages at `now_s`, monotonic seconds."""
    timings = chunk.timings
    at_s = timings.due_s, timings.started_s, timings.denoised_s, timings.ready_s, chunk.packaged_at_s
    due_s, started_s, denoised_s, decoded_s, packaged_s = [
        # In half the time of `round` to digits.
        round((now_s - at) * 1e6) / 1e6 if at < now_s else 0.0
        for at in at_s
    ]
    return ChunkStages.of_fields(
        {
            "due_s": due_s,
            "started_s": started_s,
            "denoised_s": denoised_s,
            "decoded_s": decoded_s,
            "packaged_s": packaged_s,
        }
    )
