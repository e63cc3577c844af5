"""The decoding of a worker whose sessions have no decoder's caches: elsewhere, or here from latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turboserve.worker.engine.backend import Decoded, Decoding
from turboserve.worker.engine.decode_jobs import (
    CacheApart,
    CachedDecoder,
    CacheTable,
    DecodeJob,
    RemoteDecoder,
    digest_of_latents,
)
from turboserve.worker.engine.errors import InvalidRebuildError
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.engine.session import UndecodedChunk
from turboserve.worker.engine.state_pages import SOURCES_AT_ONCE
from turboserve.worker.engine.streams import settle, to_host

OWN_CACHES = SOURCES_AT_ONCE
"""Caches that the worker itself keeps while it decodes: as many as the workspace has beside the sessions. A
worker whose states have caches sends these with them."""


class DecodingApart:
    """Decodes the chunks of one worker's sessions elsewhere. See `Backend.decode`."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: type of the latents that sessions and the hot store keep."""
        self.decoder = decoder
        self.remote: RemoteDecoder | None = None
        """None: the worker decodes all chunks."""
        self.decoded_here = 0
        """Chunks that the worker itself has decoded."""
        self._device, self._dtype = device, dtype
        self._here = CachedDecoder(decoder, device, CacheTable(OWN_CACHES))

    def __call__(self, batch: Sequence[Decoding]) -> list[Decoded]:
        """See `Backend.decode`. A recovered session's decoder is not warmed: its next chunk names the cache
        or brings its context."""
        host = [to_host(each.item.latents) for each in batch]
        settle(self._device)
        jobs = [self._job(each, latents) for each, latents in zip(batch, host, strict=True)]
        wanted = [job for job in jobs if job is not None]
        shown: dict[int, Tensor | None] = {}
        if wanted and self.remote is not None:
            shown = dict(zip(map(id, wanted), self.remote.decode(wanted), strict=True))
        return [
            Decoded(self._frames(job, shown), latents, CacheApart())
            for job, latents in zip(jobs, host, strict=True)
        ]

    def _frames(self, job: DecodeJob | None, shown: dict[int, Tensor | None]) -> Tensor:
        if job is None:
            return torch.empty(0, dtype=torch.uint8)
        frames = shown.get(id(job))
        if frames is None:
            frames = self._here.decode(job)
            self.decoded_here += 1
        return frames

    def _job(self, each: Decoding, latents: Tensor) -> DecodeJob | None:
        item = each.item
        if not isinstance(item, UndecodedChunk):
            return None
        base = None
        if each.cache is not None:
            if not each.context:
                raise InvalidRebuildError(f"decoder: no latents before chunk {item.index} are kept")
            base = digest_of_latents(item.index - 1, self._kept(each.context[-1]))
        digest = digest_of_latents(item.index, self._kept(latents))
        return DecodeJob(each.session.name, item.index, latents, base, digest, each.context)

    def _kept(self, latents: Tensor) -> Tensor:
        return latents.to("cpu", self._dtype)
