"""Random scenes and clips of the toy world, for the training scripts and the benchmark."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

from .world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, Figure, Scene

HELD_OUT_IN = 5
"""One scene in this many is never trained on."""


def held_out(scene: Scene) -> bool:
    """Return True for scenes kept for the benchmark. A checksum of the words decides, so it never changes."""
    words = "|".join(f"{f.shape} {f.colour} {f.motion}" for f in scene.figures) + "|" + scene.background
    return scene not in PROMISED and zlib.crc32(words.encode()) % HELD_OUT_IN == 0


def single_scenes() -> Iterator[Scene]:
    """Yield all 576 scenes with one figure."""
    for shape in SHAPES:
        for colour in COLOURS:
            for motion in MOTIONS:
                for background in BACKGROUNDS:
                    yield Scene((Figure(shape, colour, motion),), background)


def random_scene(rng: random.Random, pair: float = 0.5, want_held_out: bool | None = False) -> Scene:
    """Draw a scene with two figures of different colors (with probability `pair`) or with one.

    `want_held_out`: True for the benchmark's scenes only, False for the others, None for any.
    """
    while True:
        colours = rng.sample(list(COLOURS), 2)
        count = 2 if rng.random() < pair else 1
        figures = tuple(Figure(rng.choice(SHAPES), colours[i], rng.choice(MOTIONS)) for i in range(count))
        scene = Scene(figures, rng.choice(list(BACKGROUNDS)))
        if want_held_out is None or held_out(scene) == want_held_out:
            return scene


PROMISED = (
    Scene((Figure("circle", "red", "left"),), "black"),
    Scene((Figure("square", "blue", "up"),), "black"),
    Scene((Figure("triangle", "green", "right"),), "black"),
)
"""Scenes that the documentation shows; always trained on."""
