"""A worker's connection to one decode worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from turboserve.worker.engine.decode_jobs import DecodeJob
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.remote_decoding.frames import (
    Allotment,
    AskAllotment,
    ChunkFrames,
    DecodeChannel,
    DecodeChunk,
    NoCache,
    NoRoom,
    TensorSpec,
)
from turboserve.worker.transfer.channel import explained, unexpected
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    DeadlineExceededError,
    PeerLostError,
    TransferBackendError,
    TransferError,
)

REASON_S = 0.5
"""Longest time for which the reason of a closed link is awaited, seconds."""


class DecodeConnection:
    """An authenticated connection to one decode worker. One question at a time."""

    def __init__(self, worker: str, channel: DecodeChannel, config: ModelConfig) -> None:
        self.worker = worker
        self.closed = asyncio.Event()
        self.late = False
        """Whether the connection was closed because an answer was late."""
        self._channel, self._config = channel, config
        self._turn = asyncio.Lock()
        self._numbers = itertools.count()

    @property
    def link_kinds(self) -> str:
        """Backends over which payloads pass. Empty: they pass over the connection."""
        links = self._channel.links
        return "" if links is None else links.kinds

    @property
    def failed_links(self) -> frozenset[str]:
        """Backends that have failed at a payload."""
        links = self._channel.links
        return frozenset() if links is None else frozenset(links.failed)

    async def ask(self, job: DecodeJob, *, with_context: bool, seconds: float) -> NoCache | NoRoom | Tensor:
        """The frames of a chunk, or what the worker lacks. A failed connection closes.

        Raises `TransferError`.
        """
        deadline = Deadline(seconds, asyncio.get_running_loop().time)
        try:
            async with asyncio.timeout(seconds), self._turn:
                try:
                    return await self._ask(job, with_context, deadline)
                except TransferError as error:
                    raise await self._explained(error, deadline) from error
        except (TimeoutError, DeadlineExceededError):
            self.late = True
            self.close()
            raise DeadlineExceededError(f"{self.worker}: not within {seconds:.3g} s") from None
        except BaseException:
            # A canceled question has an answer that no later one must take for its own.
            self.close()
            raise

    async def _explained(self, error: TransferError, deadline: Deadline) -> TransferError:
        """Return why a question has failed. Notes a backend that has failed at the decode worker."""
        links = self._channel.links
        if links is None or self.closed.is_set():
            return error
        if isinstance(error, PeerLostError):
            # The decode worker closes its link first.
            error = await explained(self._channel, error, deadline.left(REASON_S))
        if isinstance(error, TransferBackendError):
            links.failed_elsewhere()
        return error

    async def _ask(self, job: DecodeJob, with_context: bool, deadline: Deadline) -> NoCache | NoRoom | Tensor:
        if self.closed.is_set():
            raise PeerLostError(f"{self.worker}: the connection is closed")
        payloads: tuple[Tensor, ...] = (job.latents,)
        if with_context:
            # Copies from the device may wait for its work: not on the event loop's thread.
            payloads = (job.latents, await asyncio.to_thread(_stacked, job.context))
        number = next(self._numbers)
        question = DecodeChunk(
            number=number,
            session=job.session,
            index=job.index,
            base=job.base,
            digest=job.digest,
            latents=TensorSpec.of(payloads[0]),
            context=TensorSpec.of(payloads[1]) if with_context else None,
        )
        await self._channel.post(question, payloads, deadline.left())
        answer = await self._channel.next(deadline.left())
        if not isinstance(answer, ChunkFrames | NoCache | NoRoom) or answer.number != number:
            raise unexpected(answer)
        if not isinstance(answer, ChunkFrames):
            return answer
        width, height = self._config.frame_size
        frames = len(job.latents) * self._config.frames_per_latent
        count = frames if job.base is not None else frames - self._config.frames_per_latent + 1
        return await self._channel.payload(answer.frames, (count, height, width, 3), deadline.left())

    async def ask_allotment(self, seconds: float) -> Allotment:
        """What the worker allots to this one. A failed connection closes.

        Raises `TransferError`.
        """
        try:
            async with self._turn:
                if self.closed.is_set():
                    raise PeerLostError(f"{self.worker}: the connection is closed")
                await self._channel.post(AskAllotment(), (), seconds)
                answer = await self._channel.next(seconds)
                if not isinstance(answer, Allotment):
                    raise unexpected(answer)
                return answer
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection at once."""
        if not self.closed.is_set():
            self.closed.set()
            self._channel.abort()


def _stacked(context: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.cpu() for each in context])
