"""Decodes what a viewer received, as a player would."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

import av
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Video:
    """Decoded video. `frames` is uint8 [frames, height, width, RGB], `times_s` each frame's media time."""

    frames: NDArray[np.uint8]
    times_s: list[float]
    fps: float

    def between(self, start_s: float, end_s: float) -> NDArray[np.uint8]:
        """Return the frames whose media times lie in [start_s, end_s)."""
        tolerance_s = 0.25 / self.fps
        chosen = [start_s - tolerance_s <= time_s < end_s - tolerance_s for time_s in self.times_s]
        frames: NDArray[np.uint8] = self.frames[np.array(chosen, dtype=bool)]
        return frames

    def gaps(self) -> list[tuple[float, float]]:
        """Return neighboring media times that are not one frame apart; empty for contiguous video."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return [(earlier, later) for earlier, later in pairs if abs(later - earlier - 1 / self.fps) > 1e-3]


def decode(mp4: bytes) -> Video:
    """Decode a fragmented MP4. Raises av.FFmpegError for data that no player would play."""
    frames, times_s = [], []
    with av.open(BytesIO(mp4), "r") as container:
        for frame in container.decode(container.streams.video[0]):
            frames.append(frame.to_ndarray(format="rgb24"))
            times_s.append(float(frame.time or 0.0))
    # The container's own average rate is a guess from the first fragments.
    fps = round(1 / float(np.median(np.diff(times_s))), 3) if len(times_s) > 1 else 0.0
    return Video(np.stack(frames), times_s, fps)
