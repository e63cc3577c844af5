"""The last stage of toyworld's decoder: figures with clean edges before a landscape.

The features say where figures are, with a color and an opacity for each pixel, and which of the learned
landscapes lies behind them. A frame has one background, so the landscape is chosen for the frame as a whole:
noise of the latents leaves no trace in it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH = 4
_FIGURE = 4
"""Red, green, blue and opacity."""


class ToyPicture(nn.Module):
    """Paints frames from the decoder's features.

    Args:
        inputs: Channels of the features, which have twice the resolution of the latents.
        channels: Channels at twice the resolution of the features.
        frame_channels: The same, for each frame apart.
        frames: Frames of one latent frame.
        landscapes: Number of landscapes.
        size: Height and width of a landscape, in pixels. Frames of another size have it stretched.
        patch: Pixels across and down that one cell of the last convolution paints. A cell of the latents
            becomes 4·patch pixels across and down.
    """

    landscapes: Tensor

    def __init__(
        self,
        inputs: int,
        channels: int,
        frame_channels: int,
        frames: int,
        landscapes: int,
        size: int,
        patch: int = _PATCH,
    ) -> None:
        super().__init__()
        self.frames, self._patch = frames, patch
        self.choose = nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, frames * landscapes))
        self.up = nn.Conv2d(inputs, 4 * channels, 1)
        self.norm = nn.GroupNorm(1, channels)
        self.mix = nn.Conv2d(channels, channels, 3)
        self.split = nn.Conv2d(channels, frames * frame_channels, 1)
        self.sharpen = nn.Conv2d(frame_channels, frame_channels, 3)
        self.out = nn.Conv2d(frame_channels, _FIGURE * patch * patch, 1)
        self.register_buffer("landscapes", torch.zeros(landscapes, 3, size, size))

    @property
    def pixels_per_latent(self) -> int:
        """Pixels of a frame for one cell of the latents, across and down."""
        return 4 * self._patch

    def forward(self, features: Tensor) -> Tensor:
        """Features [N, inputs, h, w] → pixels [N, frames, 3, 2·patch·h, 2·patch·w] around -1..1."""
        count = len(features)
        chosen = self.choose(features.mean((2, 3))).view(count, self.frames, -1).softmax(-1)
        h = F.pixel_shuffle(self.up(features), 2)
        h = h + F.silu(self.mix(around(self.norm(h))))
        h = F.silu(self.split(h)).reshape(count * self.frames, -1, *h.shape[2:])
        h = h + F.silu(self.sharpen(around(h)))
        figure = F.pixel_shuffle(self.out(h), self._patch).unflatten(0, (count, self.frames))
        colour, opacity = figure[:, :, :3], figure[:, :, 3:].sigmoid()
        landscapes = self.landscapes
        if landscapes.shape[2:] != figure.shape[3:]:
            landscapes = F.interpolate(landscapes, figure.shape[3:], mode="bilinear")
        behind = torch.einsum("nfk,kchw->nfchw", chosen, landscapes)
        return torch.lerp(behind, colour, opacity)


def around(x: Tensor) -> Tensor:
    """Pad by one on each side: the toy world is a torus."""
    return F.pad(x, (1, 1, 1, 1), mode="circular")
