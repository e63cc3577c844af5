"""Finds the first frame in which a figure moves where a key has sent it, from pixels alone.

Pure: times are seconds of any one clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turboserve.experiments.toyworld import world
from turboserve.experiments.toyworld.judge import judge, positions

JUDGED_FRAMES = 12
"""Frames from the answer on that must show the new motion as a whole."""
LEAST_FRAMES = 8
LEAST_STEP = world.SPEED / 2
"""Pixels of the world in the new direction, between two frames, that are a move there."""


@dataclass(frozen=True)
class Frame:
    """A frame on the screen."""

    shown_s: float
    pixels: NDArray[np.uint8]
    """uint8 [height, width, RGB], a multiple of the world's 64 pixels."""


def first_answer(frames: Sequence[Frame], direction: str, pressed_s: float) -> float | None:
    """Return when the first frame was shown in which the figure moves as steered. None: it never does.

    The figure moves at a right angle to `direction` before. Frames before `pressed_s` show from where.
    """
    if len(frames) < LEAST_FRAMES:
        return None
    pixels = np.stack([frame.pixels for frame in frames])
    centres, seen = positions(pixels)
    steps = (centres[1:] - centres[:-1] + world.PIXELS / 2) % world.PIXELS - world.PIXELS / 2
    along = steps @ np.array(world.DIRECTION[direction])
    steered = (along >= LEAST_STEP) & seen[1:] & seen[:-1]
    for number in range(1, len(frames) - LEAST_FRAMES + 1):
        # One step may be noise. The motion of all frames from here on is the judge's to say.
        if frames[number].shown_s < pressed_s or not steered[number - 1 : number + 2].all():
            continue
        figures = judge(pixels[number - 1 : number - 1 + JUDGED_FRAMES]).figures
        if figures and figures[0].motion == direction:
            return frames[number].shown_s
    return None
