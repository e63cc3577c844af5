"""Chunks as a worker's encoder makes them."""

from __future__ import annotations

import numpy as np
import pytest

from turboserve.recorder.core.batching import LogChunk
from turboserve.recorder.core.segments import Index
from turboserve.recorder.storage import Storage
from turboserve.worker.media import FragmentEncoder

FPS, FRAMES, SIDE = 16.0, 12, 64


class Encoder:
    """Encodes chunks of gray frames. The brightness of frame n is `shade(n)`."""

    def __init__(self, side: int = SIDE) -> None:
        self._encoder, self._side = FragmentEncoder(), side

    def chunk(self, index: int) -> LogChunk:
        frames = np.empty((FRAMES, self._side, self._side, 3), dtype=np.uint8)
        for number in range(FRAMES):
            frames[number] = shade(index * FRAMES + number)
        encoded = self._encoder.encode(frames, index=index, first_frame=index * FRAMES, fps=FPS)
        return LogChunk(index, index * FRAMES, FRAMES, FPS, encoded.init, encoded.fragment)


def shade(frame: int) -> int:
    """Brightness of a frame, by which a test recognizes it: steps are far above the encoder's error."""
    return 30 + 8 * (frame % 25)


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder()


async def check_stored(storage: Storage, folder: str) -> list[int]:
    """Return the indexes of the stored chunks, read from the objects' bytes: each chunk is `<INDEX>`."""
    index = Index.of(await storage.listing(folder))
    data = b"".join([await storage.get(f"{folder}/{segment.name}") for segment in index.segments])
    found = [int(text) for text in data.decode().strip("<>").split("><")]
    assert index.chunks == len(found)
    return found
