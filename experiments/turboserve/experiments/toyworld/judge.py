"""Recognizes what a clip of the toy world shows, from pixels alone.

The benchmark's ground truth is tested against it. The method is analytic, without learning:

- The background is the palette color that most pixels are near.
- Each other pixel is explained as a mix of the background and one figure color.
- Colors that cover enough pixels in enough frames are figures.
- A figure's outline is compared with the three shapes, and its path over the torus with the motions:
  circling, standing still and eight directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from turboserve.experiments.toyworld.world import (
    BACKGROUNDS,
    COLOURS,
    DIRECTION,
    PERIOD,
    PIXELS,
    RADIUS,
    SHAPES,
    SPEED,
    Figure,
    Scene,
    coverage,
)

Floats = NDArray[np.floating]

MIN_AREA = 45.0
"""Pixels of one color, on average over the frames, that make a figure (a triangle has 130)."""
MAX_MIX_ERROR = 60.0
"""Distance in RGB to the nearest mix of background and color beyond which a pixel is not explained."""
MAX_SOLID_ERROR = 45.0
"""Maximum distance in RGB for the pixels by which a color is detected."""
MIN_OVERLAP = 0.62
"""Intersection over union below which an outline is no shape."""
MAX_MOTION_ERROR = 0.85
"""Pixels per frame between the path and the nearest motion, beyond which it is none."""
LAG = 3
"""Frames between two compared places; evens out the noise of a centroid."""

_CLOCKWISE = 2 * math.pi / PERIOD
_NAMES = list(COLOURS)
_PAINT = np.array([COLOURS[name] for name in _NAMES], dtype=np.float32)


@dataclass(frozen=True)
class Seen:
    """One figure of a clip. Shape or motion is None if nothing fits; area is in pixels per frame."""

    shape: str | None
    colour: str
    motion: str | None
    area: float


@dataclass(frozen=True)
class Verdict:
    """Contents of a clip: figures by falling area, and a background."""

    figures: tuple[Seen, ...]
    background: str

    def colours_match(self, scene: Scene) -> bool:
        """Return whether the figures have exactly the colors of the scene."""
        return sorted(f.colour for f in self.figures) == sorted(f.colour for f in scene.figures)

    def shapes_match(self, scene: Scene) -> bool:
        """Return whether each color of the scene has its shape, and there is no other figure."""
        return self.colours_match(scene) and all(self._of(f).shape == f.shape for f in scene.figures)

    def motions_match(self, scene: Scene) -> bool:
        """Return whether each color of the scene has its motion, and there is no other figure."""
        return self.colours_match(scene) and all(self._of(f).motion == f.motion for f in scene.figures)

    def _of(self, figure: Figure) -> Seen:
        return next(seen for seen in self.figures if seen.colour == figure.colour)


def judge(frames: NDArray[np.uint8]) -> Verdict:
    """Judge frames [F, 64, 64, 3] or twice as large, F ≥ 8, of one prompt (no switch inside)."""
    pixels = _in_world_pixels(frames.astype(np.float32))
    background = _background(pixels)
    figures = [
        Seen(_shape(mine), colour, _motion(mine), area) for colour, area, mine in _figures(pixels, background)
    ]
    return Verdict(tuple(figures), background)


def positions(frames: NDArray[np.uint8]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return where the largest figure of frames [F, 64, 64, 3] or twice as large is, and where it is seen.

    The places [F, 2] are pixels of the world across and down, on the torus.
    """
    pixels = _in_world_pixels(frames.astype(np.float32))
    found = _figures(pixels, _background(pixels))
    if not found:
        return np.zeros((len(frames), 2)), np.zeros(len(frames), dtype=bool)
    _, _, weight = found[0]
    return _centres(weight)


def has_colours(frames: NDArray[np.uint8], colours: Sequence[str]) -> bool:
    """Return whether the clip's figures have exactly these colors, regardless of shape and motion."""
    return sorted(seen.colour for seen in judge(frames).figures) == sorted(colours)


def _in_world_pixels(pixels: Floats) -> Floats:
    """Return the frames with one pixel for each of the world's, as means of the pixels there."""
    count, height, width, channels = pixels.shape
    fine = height // PIXELS
    means: Floats = pixels.reshape(count, height // fine, fine, width // fine, fine, channels).mean((2, 4))
    return means


def _background(pixels: Floats) -> str:
    typical = np.median(pixels.reshape(len(pixels), -1, 3), axis=(0, 1))
    return min(BACKGROUNDS, key=lambda name: float(np.abs(typical - np.array(BACKGROUNDS[name])).sum()))


def _figures(pixels: Floats, background: str) -> list[tuple[str, float, Floats]]:
    """Return color, pixels per frame, and share of each pixel [F, H, W] of each figure, by falling area."""
    behind = np.array(BACKGROUNDS[background], dtype=np.float32)
    # A few frames show which colors occur; only those are searched for in all frames.
    alpha, error = _unmix(pixels[:: max(1, len(pixels) // 4)], behind, _PAINT)
    solid = (alpha > 0.7) & (error < MAX_SOLID_ERROR)
    nearest = error.argmin(-1)
    counts = np.array([(solid[..., i] & (nearest == i)).sum((1, 2)).mean() for i in range(len(_NAMES))])
    chosen = [int(i) for i in np.argsort(-counts) if counts[i] >= MIN_AREA][:3]
    alpha, error = _unmix(pixels, behind, _PAINT[chosen])
    # Faint mixes are noise of the background, which covers far more pixels than the figures.
    weight = np.where(error < MAX_MIX_ERROR, ((alpha - 0.25) * 2).clip(0.0, 1.0), 0.0)
    figures = []
    for place, colour in enumerate(chosen):
        mine = weight[..., place].copy()
        for rival in range(len(chosen)):
            if rival != place:
                # An edge pixel fits several colors; the color that fits best gets it.
                mine[error[..., rival] < error[..., place]] = 0.0
        figures.append((_NAMES[colour], float(counts[colour]), mine))
    return figures


def _unmix(pixels: Floats, behind: Floats, paint: Floats) -> tuple[Floats, Floats]:
    """Return the share of each color [n, 3] in a pixel, and the error of that mix: [F, H, W, n] each."""
    direction = paint - behind
    offset = pixels - behind
    along = offset @ direction.T
    length = (direction**2).sum(-1)
    alpha = (along / length).clip(0.0, 1.0)
    # |offset − α·direction|², expanded: no array of shape [F, H, W, n, 3] is created.
    square = (offset**2).sum(-1)[..., None] - 2 * alpha * along + alpha**2 * length
    return alpha, np.sqrt(square.clip(0.0))


def _centres(weight: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the centroid per frame on the torus [F, 2] (x, y), and the frames with enough pixels."""
    angles = 2 * math.pi * (np.arange(PIXELS) + 0.5) / PIXELS
    wave = np.exp(1j * angles)
    along_x = weight.sum(1) @ wave
    along_y = weight.sum(2) @ wave
    centres = np.stack((np.angle(along_x), np.angle(along_y)), -1) * PIXELS / (2 * math.pi)
    return centres % PIXELS, weight.sum((1, 2)) > 0.6 * np.median(weight.sum((1, 2)))


def _motion(weight: Floats) -> str | None:
    centres, seen = _centres(weight)
    steps = (centres[LAG:] - centres[:-LAG] + PIXELS / 2) % PIXELS - PIXELS / 2
    good = seen[LAG:] & seen[:-LAG]
    if good.sum() < 3:
        return None
    steps, times = steps[good] / LAG, np.arange(len(good))[good]
    moves = steps[:, 0] + 1j * steps[:, 1]
    found: dict[str, float] = {}
    for name, (across, down) in DIRECTION.items():
        found[name] = float(np.median(np.abs(moves - SPEED * complex(across, down))))
    spin = np.exp(1j * _CLOCKWISE * times)
    length = 2 * RADIUS * math.sin(_CLOCKWISE * LAG / 2) / LAG
    phase = np.angle((moves * spin.conj()).sum())
    found["circling"] = float(np.median(np.abs(moves - length * spin * np.exp(1j * phase))))
    best = min(found, key=lambda name: found[name])
    return best if found[best] <= MAX_MOTION_ERROR else None


def _shape(weight: Floats) -> str | None:
    """Return the shape whose outline overlaps best, placed by least squares around the centroid."""
    centres, seen = _centres(weight)
    rows = np.flatnonzero(seen)[:: max(1, int(seen.sum()) // 4)]
    if not len(rows):
        return None
    drawn = weight[rows]
    best, overlap = None, MIN_OVERLAP
    shifts = [(dx, dy) for dx in (-0.7, 0.0, 0.7) for dy in (-1.4, -0.7, 0.0, 0.7, 1.4)]
    for name in SHAPES:
        scores = []
        for shift in shifts:
            places = torch.tensor(centres[rows] + np.array(shift), dtype=torch.float32)
            model = coverage(name, places).numpy()
            common = np.minimum(model, drawn).sum((1, 2))
            scores.append(common / np.maximum(model, drawn).sum((1, 2)))
        score = float(np.max(scores, axis=0).mean())
        if score > overlap:
            best, overlap = name, score
    return best
