"""The decoding of a worker that decodes its sessions' chunks itself, by one of two decoders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turboserve.worker.engine.backend import Decoded, Decoding
from turboserve.worker.engine.decode_jobs import FAST, CacheApart, is_fast, rebuilt_cache
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.engine.streams import to_host

WARM_CHUNKS = 2
"""Number of chunks that warm a decoder at a switch. The Wan VAE takes 0.24 s for each on an H200."""


class NamedDecoder:
    """The fast decoder. Its caches say so by the names of their tensors."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.cache_bytes = decoder.cache_bytes

    @property
    def weight_bytes(self) -> int:
        """See `Decoder.weight_bytes`."""
        return self._decoder.weight_bytes

    @property
    def workspace_bytes(self) -> int:
        """See `Decoder.workspace_bytes`."""
        return self._decoder.workspace_bytes

    def decode(
        self, latents: Tensor, caches: Sequence[dict[str, Tensor]] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """See `Decoder.decode`."""
        own = caches and [{name.removeprefix(FAST): t for name, t in each.items()} for each in caches]
        frames, after = self._decoder.decode(latents, own)
        return frames, [{FAST + name: t for name, t in each.items()} for each in after]


class DecodingHere:
    """Decodes chunks. See `Backend.decode`.

    A session's cache is of the decoder that has decoded its newest chunk. At a switch, the other decoder
    first decodes the newest latents before it (`WARM_CHUNKS`), and discards the frames: so it continues the
    video.
    """

    def __init__(self, decoder: Decoder, fast: Decoder | None, device: torch.device) -> None:
        """`fast`: see `Models.fast_decoder`."""
        self.decoder, self._device = decoder, device
        self._fast = None if fast is None else NamedDecoder(fast)
        self.cache_bytes = max(decoder.cache_bytes, 0 if fast is None else fast.cache_bytes)
        """Bytes of one session's cache."""

    def __call__(self, batch: Sequence[Decoding]) -> list[Decoded]:
        """See `Backend.decode`."""
        fast = [self._takes_fast(each) for each in batch]
        made: dict[int, Decoded] = {}
        for which in sorted(set(fast)):
            rows = [place for place, its in enumerate(fast) if its is which]
            made |= zip(rows, self._decode(which, [batch[place] for place in rows]), strict=True)
        return [made[place] for place in range(len(batch))]

    def _takes_fast(self, each: Decoding) -> bool:
        """Whether the fast decoder decodes the chunk. Without latents that could warm the decoder of its
        configuration, the one before it goes on."""
        if self._fast is None:
            return False
        cache = each.cache
        if cache is not None and not isinstance(cache, CacheApart) and not each.context:
            return is_fast(cache)
        return each.is_fast

    def _decode(self, fast: bool, batch: Sequence[Decoding]) -> list[Decoded]:
        decoder = self._fast if fast and self._fast is not None else self.decoder
        caches = [self._cache(decoder, fast, each) for each in batch if each.cache is not None]
        latents = torch.stack([each.item.latents for each in batch])
        frames, after = decoder.decode(latents, caches or None)
        return [
            Decoded(to_host(shown), to_host(each.item.latents), cache)
            for each, shown, cache in zip(batch, frames, after, strict=True)
        ]

    def _cache(self, decoder: Decoder, fast: bool, each: Decoding) -> dict[str, Tensor]:
        """The session's cache. It is rebuilt where a worker kept none, or the other decoder made it."""
        assert each.cache is not None
        if isinstance(each.cache, CacheApart):
            return rebuilt_cache(decoder, each.context, self._device)
        if is_fast(each.cache) is fast:
            return each.cache
        return rebuilt_cache(decoder, each.context[-WARM_CHUNKS:], self._device)
