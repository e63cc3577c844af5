"""Video that is encoded once: a fragment at another place of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from turboserve.worker.engine.interface import ChunkReady
from turboserve.worker.media import TIMESCALE, EncodedChunk, boxes
from turboserve.worker.service.packager import ChunkEncoder

_HEADER = 8


class RepeatingEncoder:
    """Encodes the first chunk of each length, and shifts its fragment to the place of every later one."""

    def __init__(self, encoder: ChunkEncoder) -> None:
        self._encoder, self.latents_dtype = encoder, encoder.latents_dtype
        self._encoded: dict[int, EncodedChunk] = {}

    def encode(self, ready: ChunkReady, first_frame: int, fps: int) -> EncodedChunk:
        """See `ChunkEncoder.encode`."""
        frames = len(ready.frames)
        if frames not in self._encoded:
            self._encoded[frames] = self._encoder.encode(ready, first_frame, fps)
        chunk = self._encoded[frames]
        return replace(chunk, fragment=shifted(chunk.fragment, ready.index, first_frame, fps))

    def latents(self, ready: ChunkReady) -> tuple[bytes, tuple[int, ...]]:
        """See `ChunkEncoder.latents`."""
        return self._encoder.latents(ready)


def shifted(fragment: bytes, index: int, first_frame: int, fps: float) -> bytes:
    """Return a fragment of `FragmentEncoder` as it is for the same frames at another place.

    `index`, `first_frame`, `fps`: see `FragmentEncoder.encode`. Raises ValueError if it is no fragment.
    """
    found = bytearray(fragment)
    for kind, start, end in _nested(fragment, 0, len(fragment)):
        if kind == b"mfhd":
            found[end - 4 : end] = (index + 1).to_bytes(4, "big")
        elif kind == b"tfdt":
            # The version is the first byte after the header. Version 1 has times of 8 bytes.
            size = 8 if fragment[start + _HEADER] else 4
            found[end - size : end] = (first_frame * round(TIMESCALE / fps)).to_bytes(size, "big")
    return bytes(found)


def _nested(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the boxes between two places, and those within `moof` and `traf` instead of these."""
    for kind, box_start, box_end in boxes(data, start, end):
        if kind in (b"moof", b"traf"):
            yield from _nested(data, box_start + _HEADER, box_end)
        else:
            yield kind, box_start, box_end
