"""What a worker has another one decode, and decoders' caches that are kept outside the sessions' states."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from turboserve.worker.engine.errors import InvalidRebuildError
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.engine.streams import settle, to_host

C = TypeVar("C")


FAST = "fast_decoder."
"""Prefix of the names of a cache's tensors that the fast decoder has made (`Models.fast_decoder`). So a cache
says whose it is, in snapshots and migrations, too."""


class CacheApart(dict[str, Tensor]):
    """Stands for a decoder's cache that is no part of the session's state. It has no tensors."""


def is_fast(cache: Mapping[str, Tensor]) -> bool:
    """Whether the fast decoder has made the cache."""
    return any(name.startswith(FAST) for name in cache)


@dataclass(frozen=True, eq=False)
class DecodeJob:
    """A chunk's clean latents, and what their decoding continues."""

    session: str
    index: int
    latents: Tensor
    """[F, C, h, w]"""
    base: str | None
    """`digest` of the chunk before, behind which the cache must be. None: the latents begin a video."""
    digest: str
    """See `digest_of_latents`. It is the `base` of the session's next chunk."""
    context: tuple[Tensor, ...]
    """Clean latents of the chunks before, the oldest first, [F, C, h, w] each: without the cache, it is
    rebuilt from them."""


class RemoteDecoder(Protocol):
    """Has chunks decoded by other workers (`remote_decoding.client`)."""

    def decode(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        """Frames of each job, uint8 [N, H, W, 3] on the host. None: no other worker has decoded it in time.

        Blocks, and raises nothing.
        """
        ...


def digest_of_latents(index: int, latents: Tensor) -> str:
    """Digest of a chunk's clean latents on the host, with its index. Two chunks of one session that have the
    same digest are the same part of the same video, whichever worker generated them."""
    hasher = hashlib.blake2b(f"{index}\0{latents.dtype}\0".encode(), digest_size=16)
    hasher.update(latents.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


@dataclass(frozen=True, eq=False)
class _Kept(Generic[C]):
    digest: str
    """Digest of the last chunk that the cache has seen."""
    cache: C
    used_s: float


class CacheTable(Generic[C]):
    """At most `room` caches, one for a session. The one used last is kept longest. Pure."""

    def __init__(self, room: int, keep_s: float = 0.0) -> None:
        """`keep_s`: time for which an unused cache makes no room for another session's, seconds."""
        self.room, self._keep_s = room, keep_s
        self._kept: dict[str, _Kept[C]] = {}
        """By session, the one used last at the end."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, session: str, base: str) -> C | None:
        """The session's cache, if the chunk with the digest `base` is the last that it has seen."""
        kept = self._kept.get(session)
        return kept.cache if kept is not None and kept.digest == base else None

    def used(self, now: float, within_s: float) -> int:
        """Number of caches that were used within so many seconds."""
        return sum(now - each.used_s <= within_s for each in self._kept.values())

    def admits(self, session: str, now: float) -> bool:
        """Whether there is room for this session's cache."""
        if session in self._kept or len(self._kept) < self.room:
            return True
        oldest = next(iter(self._kept.values()), None)
        return oldest is not None and now - oldest.used_s >= self._keep_s

    def put(self, session: str, digest: str, cache: C, now: float) -> None:
        """Keep a cache in the place of the session's last one, and drop the oldest ones beyond the room."""
        self._kept.pop(session, None)
        while self._kept and len(self._kept) >= self.room:
            del self._kept[next(iter(self._kept))]
        self._kept[session] = _Kept(digest, cache, now)


class CachedDecoder:
    """A decoder with the caches of some sessions. Not thread-safe."""

    def __init__(
        self,
        decoder: Decoder,
        device: torch.device,
        caches: CacheTable[dict[str, Tensor]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.caches = caches
        self._decoder, self._device, self._clock = decoder, device, clock

    def has_cache(self, job: DecodeJob) -> bool:
        """Whether the job needs no rebuilt cache."""
        return job.base is None or self.caches.find(job.session, job.base) is not None

    @torch.inference_mode()
    def decode(self, job: DecodeJob) -> Tensor:
        """Frames, uint8 [N, H, W, 3] on the host. A cache that is not here is rebuilt from the context.

        Repeating a call gives the same. Raises `InvalidRebuildError` if there is no context either.
        """
        cache = None if job.base is None else self.caches.find(job.session, job.base)
        if cache is None and job.base is not None:
            cache = rebuilt_cache(self._decoder, job.context, self._device)
        latents = job.latents.to(self._device).unsqueeze(0)
        frames, [after] = self._decoder.decode(latents, None if cache is None else [cache])
        shown = to_host(frames[0])
        settle(self._device)
        self.caches.put(job.session, job.digest, after, self._clock())
        return shown

    @torch.inference_mode()
    def decode_together(self, jobs: Sequence[DecodeJob]) -> list[Tensor]:
        """As `decode` of each job, in one batch. Their results depend on each other by rounding only.

        The jobs are of different sessions, and each continues a cache that is here.
        """
        caches = [self.caches.find(job.session, job.base) for job in jobs if job.base is not None]
        present = [cache for cache in caches if cache is not None]
        if len(present) != len(jobs):
            raise InvalidRebuildError("decoder: a batch has a chunk without its cache")
        latents = torch.stack([job.latents for job in jobs]).to(self._device)
        frames, after = self._decoder.decode(latents, present)
        shown = [to_host(each) for each in frames]
        settle(self._device)
        for job, cache in zip(jobs, after, strict=True):
            self.caches.put(job.session, job.digest, cache, self._clock())
        return shown


@torch.inference_mode()
def rebuilt_cache(decoder: Decoder, context: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
    """A session's cache after the chunks of `context`, the oldest first, as if they began its video.

    They are decoded chunk by chunk, as the session's own decoder has decoded them. The cache is the same bit
    for bit if it depends on these chunks alone. Raises `InvalidRebuildError` without chunks.
    """
    cache: dict[str, Tensor] | None = None
    for latents in context:
        _, [cache] = decoder.decode(latents.to(device).unsqueeze(0), None if cache is None else [cache])
    if cache is None:
        raise InvalidRebuildError("decoder: neither a cache nor latents of chunks before")
    return cache
