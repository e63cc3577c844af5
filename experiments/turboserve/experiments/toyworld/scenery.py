"""The scenery behind the figures: one still landscape for each background, in that background's colors.

- black: a night sky with stars over dark hills
- navy: the sea at dusk
- gray: mountains in the mist
- white: a snow field

The landscapes stay near the background's color (`LARGEST_STEP`), so that a figure is visible everywhere on
them. `draw_landscape` has no chance in it: stars and waves have fixed places.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from turboserve.experiments.toyworld.world import BACKGROUNDS, COLOURS, PIXELS, Scene, coverage, offsets

SIZE = 2 * PIXELS
"""Pixels of a landscape, across and down."""
LARGEST_STEP = 46.0
"""Largest difference in one color channel to the background's color. Stars may differ more."""
_STARS = 46


def landscapes(size: int = SIZE) -> Tensor:
    """Return all landscapes, in the order of `BACKGROUNDS`: float [4, 3, size, size] in -1..1."""
    return torch.stack([draw_landscape(name, size) for name in BACKGROUNDS])


def draw_landscape(background: str, size: int = SIZE) -> Tensor:
    """Draw the landscape of a background: float [3, size, size] in -1..1."""
    axis = (torch.arange(size, dtype=torch.float32) + 0.5) / size
    x, y = axis[None, :].expand(size, size), axis[:, None].expand(size, size)
    picture = _DRAWN[background](x, y)
    plain = torch.tensor(BACKGROUNDS[background], dtype=torch.float32).view(3, 1, 1)
    near = torch.minimum(torch.maximum(picture, plain - LARGEST_STEP), plain + LARGEST_STEP)
    if background == "black":
        near = _with_stars(near, x, y)
    return near.clamp(0, 255) / 127.5 - 1.0


def _night(x: Tensor, y: Tensor) -> Tensor:
    picture = _shades((0, 0, 4), (12, 16, 40), (y / 0.8).clamp(0, 1))
    for height, colour in ((0.74, (9, 13, 24)), (0.84, (5, 8, 15))):
        picture = _below(picture, y, height + _ridge(x, height, 0.05), colour)
    return picture


def _sea(x: Tensor, y: Tensor) -> Tensor:
    picture = _shades((10, 12, 72), (40, 34, 112), (y / 0.6).clamp(0, 1))
    water = _shades((16, 26, 104), (6, 10, 62), ((y - 0.6) / 0.4).clamp(0, 1))
    # Waves become longer and farther apart toward the viewer.
    depth = ((y - 0.6) / 0.4).clamp(min=0)
    ripple = torch.sin(
        2 * math.pi * (26 * depth.sqrt() + 0.35 * torch.sin(2 * math.pi * (3 * x + 5 * depth)))
    )
    crest = (
        (ripple - 0.45).clamp(min=0) / 0.55 * (0.4 + 0.6 * torch.sin(2 * math.pi * (4 * x - 7 * depth)).abs())
    )
    water = water + crest * torch.tensor((14.0, 22.0, 34.0)).view(3, 1, 1)
    return torch.where(y > 0.6, water, picture)


def _mist(x: Tensor, y: Tensor) -> Tensor:
    picture = _shades((134, 136, 140), (156, 158, 160), (y / 0.45).clamp(0, 1))
    for height, colour in (
        (0.46, (142, 144, 148)),
        (0.58, (128, 130, 134)),
        (0.72, (114, 117, 121)),
        (0.86, (99, 102, 106)),
    ):
        picture = _below(picture, y, height + _ridge(x, height, 0.07), colour)
    return picture


def _snow(x: Tensor, y: Tensor) -> Tensor:
    picture = _shades((236, 243, 255), (250, 252, 255), (y / 0.6).clamp(0, 1))
    for height, colour in ((0.6, (232, 238, 248)), (0.72, (244, 247, 252)), (0.84, (255, 255, 255))):
        picture = _below(picture, y, height + _ridge(x, height, 0.05), colour)
    return picture


_DRAWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "black": _night,
    "white": _snow,
    "gray": _mist,
    "navy": _sea,
}


def _ridge(x: Tensor, height: float, size: float) -> Tensor:
    """Return the outline of hills around 0, the same at both edges of the picture."""
    turn, seed = 2 * math.pi * x, 40.0 * height
    return size * (
        0.6 * torch.sin(turn + seed)
        + 0.3 * torch.sin(2 * turn + 1.7 * seed)
        + 0.18 * torch.sin(5 * turn + 2.3 * seed)
    )


def _below(picture: Tensor, y: Tensor, edge: Tensor, colour: tuple[int, int, int]) -> Tensor:
    """Paint everything below `edge` in one color, with a soft edge of one pixel."""
    share = ((y - edge) * y.shape[0] + 0.5).clamp(0, 1)
    return torch.lerp(picture, _paint(colour).expand_as(picture), share)


def _with_stars(picture: Tensor, x: Tensor, y: Tensor) -> Tensor:
    draw, size = random.Random(7), x.shape[0]
    for _ in range(_STARS):
        across, down, bright = draw.random(), 0.66 * draw.random() ** 1.2, 70 + 150 * draw.random() ** 2
        near = (1.1 - ((x - across).square() + (y - down).square()).sqrt() * size).clamp(0, 1)
        picture = torch.maximum(picture, near * bright * torch.tensor((0.92, 0.95, 1.0)).view(3, 1, 1))
    return picture


def _shades(top: tuple[int, int, int], bottom: tuple[int, int, int], share: Tensor) -> Tensor:
    return torch.lerp(_paint(top).expand(3, *share.shape), _paint(bottom).expand(3, *share.shape), share)


def _paint(colour: tuple[int, int, int]) -> Tensor:
    return torch.tensor(colour, dtype=torch.float32).view(3, 1, 1)


def draw_batch(scenes: Sequence[Scene], places: Tensor, behind: Tensor) -> Tensor:
    """Draw many scenes as the model shows them: figures with soft shading before the landscapes `behind`.

    `places`: [scenes, 2 or 1, n, 2] pixels of the world, as in `render_batch`. `behind`: `landscapes()`.
    Returns float [scenes, n, 3, 128, 128] in -1..1.
    """
    frames = without_figures(scenes, places.shape[2], behind).clone()
    for row, scene in enumerate(scenes):
        for index, figure in enumerate(scene.figures):
            at = places[row, index]
            alpha = coverage(figure.shape, at, SIZE // PIXELS).unsqueeze(1)
            paint = _paint(COLOURS[figure.colour]) * light(at).unsqueeze(1)
            frames[row] = torch.lerp(frames[row], paint.clamp(0, 255) / 127.5 - 1.0, alpha)
    return frames


def without_figures(scenes: Sequence[Scene], frames: int, behind: Tensor) -> Tensor:
    """Return the landscapes of scenes for a number of frames: [scenes, frames, 3, 128, 128]."""
    rows = torch.tensor([list(BACKGROUNDS).index(scene.background) for scene in scenes])
    return behind[rows].unsqueeze(1).expand(-1, frames, -1, -1, -1)


def light(places: Tensor) -> Tensor:
    """Return the light on figures at `places` [n, 2], from the upper left: [n, 128, 128] around 1."""
    dx, dy = offsets(places, SIZE // PIXELS)
    return (0.98 - 0.008 * (dx + dy)).clamp(0.86, 1.1)
