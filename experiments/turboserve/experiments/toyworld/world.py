"""The toy world: one or two flat shapes that move over a plain background on a torus.

The world has no chance in it, on purpose: a small model that takes four steps cannot choose well between
equally likely videos. Speed, size, radius and start are fixed, so the prompt determines the video. A shape
that moves straight covers 8 pixels, one latent cell, in 4 frames, which is one latent frame. A circle takes
24 frames, two chunks of 12 frames. Every shape is therefore on the 8-pixel lattice at every boundary of such
chunks, for any earlier prompts. Where chunks have one latent frame, a circling shape may stop between lattice
places. It then slips to the nearest one within the next latent frame, so that all straight paths are on the
lattice at every latent frame.

A `Body` is the state of one shape at a boundary: after the last frame of a chunk. The first chunk has 9
frames, each later one 12, and 4 · i is the last frame of latent frame i.

Steering gives a figure one of the motions of `STEERED`, among them four diagonal ones that no prompt names. A
diagonal motion covers one latent cell across and one down in each latent frame.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turboserve.worker.model.toy_steering import STEPS

PIXELS = 64
CHUNK_FRAMES = 12
FIRST_CHUNK_FRAMES = 9
SPEED = 2.0
"""Pixels per frame of a straight motion."""
RADIUS = 8.0
"""Radius of the path of a circling shape, in pixels."""
PERIOD = 24
"""Frames per turn of a circling shape."""
START = (24.0, 24.0)
"""Place of the first figure after the first chunk, in pixels across and down.

It is the middle of a patch of the transformer.
"""
SECOND_OFFSET = (32.0, 16.0)
"""Pixels from the first shape to the second at the start: straight paths from there pass each other."""

SHAPES = ("circle", "square", "triangle")
MOTIONS = ("left", "right", "up", "down", "circling", "still")
"""Motions that prompts name."""
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 20, 30),
    "green": (20, 190, 40),
    "blue": (30, 90, 255),
    "yellow": (255, 230, 20),
    "orange": (255, 130, 0),
    "purple": (140, 30, 200),
    "cyan": (0, 220, 225),
    "pink": (255, 105, 190),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "gray": (128, 128, 128),
    "navy": (12, 16, 84),
}

STEERED: dict[str, str] = {name: {"stop": "still"}.get(name, name) for name in STEPS}
"""Value of the control `steer` → motion."""
DIRECTION: dict[str, tuple[float, float]] = {
    STEERED[name]: (float(across), float(down)) for name, (across, down) in STEPS.items()
}
"""Straight motion → its way in units of `SPEED`, across and down."""
CELL = 8.0
"""Pixels of a latent cell, across and down."""
GROUP_FRAMES = 4
"""Frames of one latent frame."""
_TIE = 1e-6
"""Pixels by which places may differ from rounding errors alone. Half a cell counts as less than half."""
_CIRCLE_RADIUS, _SQUARE_HALF, _TRIANGLE_INRADIUS = 7.5, 6.75, 5.0


@dataclass(frozen=True)
class Figure:
    """One shape with its color and motion; each a word of SHAPES, COLOURS and MOTIONS."""

    shape: str
    colour: str
    motion: str


@dataclass(frozen=True)
class Scene:
    """The content of a prompt: one or two figures on a background. The second is drawn on top."""

    figures: tuple[Figure, ...]
    background: str = "black"


@dataclass(frozen=True)
class Body:
    """Place of one figure after the last frame of a chunk, in pixels.

    The phase, in turns, is of circling figures only. The slip is the way from the body's path to where the
    figure is; it ends within the next latent frame.
    """

    x: float
    y: float
    phase: float = 0.0
    slip: tuple[float, float] = (0.0, 0.0)


def start(scene: Scene) -> tuple[Body, ...]:
    """Return the bodies after the first chunk of a new session."""
    first = Body(*START)
    return (first,) if len(scene.figures) == 1 else (first, _beside(first))


def advance(scene: Scene, bodies: Sequence[Body], frames: int) -> tuple[Body, ...]:
    """Return the bodies `frames` frames later (or earlier, if negative)."""
    return tuple(_move(figure, body, frames) for figure, body in zip(scene.figures, bodies, strict=True))


def switch(old: Scene, new: Scene, bodies: Sequence[Body]) -> tuple[Body, ...]:
    """Return the bodies with which `new` continues where `old` stopped.

    A single figure that follows a single one keeps its place, and so do two figures whose colors stay. Every
    other change is a new scene, which begins at the start: a video does not show which of two figures was
    first. A figure that begins to circle starts at phase 0; one that continues to circle keeps its phase.
    """
    if restarts(old, new):
        return start(new)
    kept = []
    for place, now in enumerate(new.figures):
        index = place if len(new.figures) == 1 else _colours(old).index(now.colour)
        body, going_on = bodies[index], old.figures[index].motion == "circling" == now.motion
        kept.append(body if going_on else _on_lattice(body))
    return tuple(kept)


def steer(scene: Scene, direction: str | None) -> Scene:
    """Return the scene whose first figure moves as steered; None: the same scene."""
    if direction is None:
        return scene
    first, *others = scene.figures
    return replace(scene, figures=(replace(first, motion=STEERED[direction]), *others))


def _on_lattice(body: Body) -> Body:
    """Return the body on the nearest lattice place, from which it differs only by its slip."""
    seen = body.x + body.slip[0], body.y + body.slip[1]
    x, y = (CELL * math.floor(place / CELL + 0.5 - _TIE) for place in seen)
    slip = [0.0 if abs(way) < _TIE else way for way in (seen[0] - x, seen[1] - y)]
    return Body(x % PIXELS, y % PIXELS, slip=(slip[0], slip[1]))


def restarts(old: Scene, new: Scene) -> bool:
    """Return True if `new` does not continue where `old` stopped but starts as a new session does."""
    alone = len(old.figures) == len(new.figures) == 1
    return not alone and sorted(_colours(old)) != sorted(_colours(new))


def _colours(scene: Scene) -> list[str]:
    return [figure.colour for figure in scene.figures]


def centres(scene: Scene, bodies: Sequence[Body], frames: Sequence[int]) -> Tensor:
    """Return the figures' centers at frames counted from the boundary (1 is the next).

    The result is [figures, n, 2], x then y.
    """
    return torch.tensor(places(scene, bodies, frames))


def places(scene: Scene, bodies: Sequence[Body], frames: Sequence[int]) -> list[list[tuple[float, float]]]:
    """Return the centers of `centres` as lists."""
    moved = [advance(scene, bodies, frame) for frame in frames]
    return [
        [((m[i].x + m[i].slip[0]) % PIXELS, (m[i].y + m[i].slip[1]) % PIXELS) for m in moved]
        for i in range(len(scene.figures))
    ]


def render(scene: Scene, places: Tensor) -> Tensor:
    """Draw a scene. `places`: [figures, n, 2] pixels. Returns uint8 [n, 64, 64, 3]."""
    return to_uint8(render_batch([scene], places[None]))[0]


def render_batch(scenes: Sequence[Scene], places: Tensor) -> Tensor:
    """Draw many scenes with anti-aliased edges.

    `places`: [scenes, 2 or 1, n, 2] pixels; the second entry of a one-figure scene is ignored. Returns float
    [scenes, n, 3, 64, 64] in -1..1.
    """
    count, _, n, _ = places.shape
    colour_of = torch.tensor([BACKGROUNDS[scene.background] for scene in scenes]) / 127.5 - 1.0
    frames = colour_of.view(count, 1, 3, 1, 1).expand(count, n, 3, PIXELS, PIXELS).clone()
    for index in range(max(len(scene.figures) for scene in scenes)):
        for kind in SHAPES:
            rows = [
                row
                for row, scene in enumerate(scenes)
                if index < len(scene.figures) and scene.figures[index].shape == kind
            ]
            if not rows:
                continue
            paint = torch.tensor([COLOURS[scenes[row].figures[index].colour] for row in rows]) / 127.5 - 1.0
            alpha = coverage(kind, places[rows, index].reshape(-1, 2)).view(len(rows), n, 1, PIXELS, PIXELS)
            frames[rows] = torch.lerp(frames[rows], paint.view(-1, 1, 3, 1, 1).expand_as(frames[rows]), alpha)
    return frames


def coverage(shape: str, places: Tensor, fine: int = 1) -> Tensor:
    """Return how much of each pixel a shape covers: places [n, 2] → [n, 64·fine, 64·fine] in 0..1, y, x.

    `fine`: pixels drawn for one of the world's pixels, across and down.
    """
    return (0.5 - distance(shape, *offsets(places, fine)) * fine).clamp(0.0, 1.0)


def distance(shape: str, dx: Tensor, dy: Tensor) -> Tensor:
    """Return the distance in pixels from a shape's outline, negative inside: dx [n, 1, W], dy [n, H, 1]."""
    if shape == "circle":
        return (dx.square() + dy.square()).sqrt() - _CIRCLE_RADIUS
    if shape == "square":
        return torch.maximum(dx.abs(), dy.abs()) - _SQUARE_HALF
    return torch.maximum(dx.abs() * (math.sqrt(3) / 2) - dy * 0.5, dy) - _TRIANGLE_INRADIUS


def offsets(places: Tensor, fine: int = 1) -> tuple[Tensor, Tensor]:
    """Return the way from `places` [n, 2] to each pixel on the torus: x [n, 1, W] and y [n, H, 1]."""
    axis = (torch.arange(PIXELS * fine, dtype=torch.float32, device=places.device) + 0.5) / fine
    half = PIXELS / 2
    dx, dy = ((axis - places[:, side, None] + half) % PIXELS - half for side in (0, 1))
    return dx[:, None, :], dy[:, :, None]


def to_uint8(frames: Tensor) -> Tensor:
    """Convert float [..., 3, H, W] in -1..1 to uint8 [..., H, W, 3]."""
    return ((frames.movedim(-3, -1) + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _move(figure: Figure, body: Body, frames: int) -> Body:
    left = max(0.0, 1.0 - frames / GROUP_FRAMES)
    slip = (body.slip[0] * left, body.slip[1] * left)
    if figure.motion == "circling":
        phase = body.phase + frames / PERIOD
        dx = RADIUS * (math.cos(2 * math.pi * phase) - math.cos(2 * math.pi * body.phase))
        dy = RADIUS * (math.sin(2 * math.pi * phase) - math.sin(2 * math.pi * body.phase))
        return Body((body.x + dx) % PIXELS, (body.y + dy) % PIXELS, phase % 1.0, slip)
    ux, uy = DIRECTION[figure.motion]
    x, y = (body.x + SPEED * ux * frames) % PIXELS, (body.y + SPEED * uy * frames) % PIXELS
    return Body(x, y, body.phase, slip)


def _beside(first: Body) -> Body:
    return Body((first.x + SECOND_OFFSET[0]) % PIXELS, (first.y + SECOND_OFFSET[1]) % PIXELS)


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
