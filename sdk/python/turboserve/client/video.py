"""Decoding of chunks to frames. Needs the extra `video` (PyAV and numpy)."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turboserve.client.errors import TurboServeError
from turboserve.client.models import Chunk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from turboserve.client.stream import VideoStream


class MissingExtraError(TurboServeError):
    """Decoding needs packages that are not installed."""

    def __init__(self) -> None:
        super().__init__("decoding needs PyAV and numpy: pip install av numpy")


@dataclass(frozen=True)
class Frame:
    """One frame of video."""

    image: NDArray[np.uint8]
    """RGB, [height, width, 3]."""
    time_s: float
    """Media time, seconds."""
    chunk: int
    """Index of its chunk."""
    control_seq: int
    """Number of the prompt that it was generated under."""


def decode(chunk: Chunk) -> list[Frame]:
    """Decode one chunk. Raises MissingExtraError."""
    try:
        import av
    except ImportError:
        raise MissingExtraError from None
    with av.open(io.BytesIO(chunk.mp4), mode="r") as container:
        images: list[Any] = [
            frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])
        ]
    return [
        Frame(image, chunk.start_s + number / chunk.format.fps, chunk.index, chunk.control_seq)
        for number, image in enumerate(images)
    ]


async def frames(stream: VideoStream, *, paced: bool = False) -> AsyncIterator[Frame]:
    """Decode a stream's chunks, in a thread beside the event loop.

    `paced`: give each frame at its time, as a player shows it: a late chunk shifts all that follow, and a
    skip discards what is left of the present chunk. Otherwise frames come as fast as they are generated.
    """
    shift_s: float | None = None
    end_s = 0.0
    async for chunk in stream:
        decoded = await asyncio.to_thread(decode, chunk)
        now = time.monotonic()
        # After a hole of the log, the next chunk is shown at once.
        if shift_s is None or now > chunk.start_s + shift_s or abs(chunk.start_s - end_s) > 1e-3:
            shift_s = now - chunk.start_s
        end_s = chunk.end_s
        for frame in decoded:
            if paced:
                await asyncio.sleep(max(0.0, frame.time_s + shift_s - time.monotonic()))
                if _skipped(stream, chunk):
                    # What follows is shown at once, too.
                    shift_s = None
                    break
                stream.playhead_s = frame.time_s
            yield frame


def _skipped(stream: VideoStream, chunk: Chunk) -> bool:
    """Whether the stream skips the rest of this chunk."""
    skip = stream.last_skip
    return skip is not None and chunk.index < skip.index and not stream.keep_skipped
