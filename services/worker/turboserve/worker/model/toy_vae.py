"""A small causal video VAE like Wan's: 16 latent channels, 8× smaller in space, 4× in time.

The first latent frame decodes to 1 frame and each other to 4. Convolutions over time look back only. Their
inputs from earlier latent frames are a cache that the caller keeps. The module holds no state, so that a
session can be decoded chunk by chunk, exported and imported. The toy world is a torus: space is padded
circularly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.toy_picture import ToyPicture, around

LATENT_CHANNELS = 16
TIME_STRIDE = 4
_PATCH = 4

Cache = dict[str, Tensor]


class _Space(nn.Module):
    """3×3 convolution over space, circular."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(around(x))
        return out


class _Block(nn.Module):
    """Residual block over space: x [N, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.first = _Space(channels, channels)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(F.silu(self.first(self.norm(x))))
        return out


class _CausalTime(nn.Module):
    """Residual mix of each frame with the two before it; the first frames see copies of frame 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.mix = nn.Conv2d(3 * channels, channels, 1)

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, F, C, H, W], past [B, 2, C, H, W] or None → (the same shape as x, the new past)."""
        batch, frames = x.shape[:2]
        h = self.norm(x.flatten(0, 1)).unflatten(0, (batch, frames))
        if past is None:
            past = h[:, :1].expand(-1, 2, -1, -1, -1)
        h = torch.cat((past, h), 1)
        stacked = torch.cat((h[:, :-2], h[:, 1:-1], h[:, 2:]), 2).flatten(0, 1)
        out = x + torch.unflatten(F.silu(self.mix(stacked)), 0, (batch, frames))
        return out, h[:, -2:].contiguous()


class ToyVae(nn.Module):
    """The VAE of toyworld. Latents are normalized to zero mean and unit deviation per channel.

    Args:
        width: Channels at 16×16.
        depth: Residual blocks at each resolution, in the encoder and in the decoder.
        fine: Residual blocks of the decoder at 16×16; by default `depth`.
        picture: Arguments of `ToyPicture`, which then paints the frames, larger than the encoder's. By
            default the decoder returns what the encoder was given.
    """

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(
        self,
        width: int = 64,
        depth: int = 2,
        fine: int | None = None,
        picture: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        deep = 2 * width
        patch = 3 * TIME_STRIDE * _PATCH * _PATCH
        self.encoder_in = nn.Conv2d(patch, width, 1)
        self.encoder_fine = nn.Sequential(*(_Block(width) for _ in range(depth)))
        self.encoder_down = nn.Conv2d(4 * width, deep, 1)
        self.encoder_coarse = nn.Sequential(*(_Block(deep) for _ in range(depth)))
        self.encoder_out = nn.Conv2d(deep, LATENT_CHANNELS, 1)
        self.decoder_in = nn.Conv2d(LATENT_CHANNELS, deep, 1)
        self.decoder_times = nn.ModuleList(_CausalTime(deep) for _ in range(depth))
        self.decoder_coarse = nn.ModuleList(_Block(deep) for _ in range(depth))
        self.decoder_up = nn.Conv2d(deep, 4 * width, 1)
        self.decoder_fine = nn.Sequential(*(_Block(width) for _ in range(fine or depth)))
        self.decoder_out: nn.Conv2d | ToyPicture
        if picture is None:
            self.decoder_out = nn.Conv2d(width, patch, 1)
        else:
            self.decoder_out = ToyPicture(width, frames=TIME_STRIDE, **picture)
        self.register_buffer("latent_mean", torch.zeros(LATENT_CHANNELS))
        self.register_buffer("latent_std", torch.ones(LATENT_CHANNELS))

    def encode(self, frames: Tensor) -> Tensor:
        """Encode frames [B, 1 + 4·(f - 1), 3, H, W] in -1..1 to latents [B, f, 16, H/8, W/8].

        Raises:
            ValueError: The number of frames is not 1 + 4·n.
        """
        if frames.shape[1] % TIME_STRIDE != 1:
            raise ValueError(f"frames: {frames.shape[1]} is not 1 + {TIME_STRIDE}·n")
        padded = torch.cat((frames[:, :1].expand(-1, TIME_STRIDE - 1, -1, -1, -1), frames), 1)
        return self.encode_groups(torch.unflatten(padded, 1, (-1, TIME_STRIDE)))

    def encode_groups(self, groups: Tensor) -> Tensor:
        """Encode groups of 4 frames [B, f, 4, 3, H, W] to latents [B, f, 16, H/8, W/8], each by itself."""
        batch, count = groups.shape[:2]
        raw = self._encode(groups.flatten(0, 1).flatten(1, 2))
        return torch.unflatten(self._normalise(raw), 0, (batch, count))

    def decode(self, latents: Tensor, cache: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Cache]:
        """latents [B, f, 16, h, w] → (frames [B, F', 3, H, W] in -1..1, the cache for the next call).

        Frames have `pixels_per_latent` pixels for a cell, 8 without `picture`.
        Without a cache the latents begin a video, and F' = 1 + 4·(f - 1); with one, F' = 4·f.
        """
        raw = latents * self.latent_std.view(-1, 1, 1) + self.latent_mean.view(-1, 1, 1)
        frames, after = self._decode(raw, cache)
        frames = frames.clamp(-1.0, 1.0)
        return (frames[:, TIME_STRIDE - 1 :] if cache is None else frames), after

    @property
    def pixels_per_latent(self) -> int:
        """Pixels of a decoded frame for one cell of the latents, across and down."""
        if isinstance(self.decoder_out, ToyPicture):
            return self.decoder_out.pixels_per_latent
        return 2 * _PATCH

    def cache_numbers(self, cells: int) -> int:
        """Number of elements of one session's cache, for latent frames of `cells` cells."""
        times = [time for time in self.decoder_times if isinstance(time, _CausalTime)]
        return sum(2 * time.mix.out_channels * cells for time in times)

    def workspace_numbers(self, frames: int, cells: int) -> int:
        """Largest number of elements while decoding `frames` latent frames, as measured: 10 times the tensors
        at the finer resolution, and the pixels; with a picture, 5 times its pixels."""
        if isinstance(self.decoder_out, ToyPicture):
            pixels = TIME_STRIDE * 3 * self.pixels_per_latent**2 * cells
            return 5 * frames * pixels
        finer = 4 * frames * cells * (self.decoder_up.out_channels // 4)
        return 10 * finer + 3 * 64 * TIME_STRIDE * frames * cells

    def _normalise(self, raw: Tensor) -> Tensor:
        return (raw - self.latent_mean.view(-1, 1, 1)) / self.latent_std.view(-1, 1, 1)

    def _encode(self, x: Tensor) -> Tensor:
        h = self.encoder_fine(self.encoder_in(F.pixel_unshuffle(x, _PATCH)))
        h = self.encoder_coarse(self.encoder_down(F.pixel_unshuffle(h, 2)))
        out: Tensor = self.encoder_out(h)
        return out

    def _decode(self, raw: Tensor, cache: Mapping[str, Tensor] | None) -> tuple[Tensor, Cache]:
        batch, count = raw.shape[:2]
        h = self.decoder_in(raw.flatten(0, 1))
        after: Cache = {}
        for index, (time, block) in enumerate(zip(self.decoder_times, self.decoder_coarse, strict=True)):
            name = f"time{index}"
            past = None if cache is None else cache[name]
            mixed, after[name] = time(h.unflatten(0, (batch, count)), past)
            h = block(mixed.flatten(0, 1))
        h = self.decoder_fine(F.pixel_shuffle(self.decoder_up(h), 2))
        pixels = self.decoder_out(h)
        if pixels.dim() == 4:
            pixels = F.pixel_shuffle(pixels, _PATCH).unflatten(1, (TIME_STRIDE, 3))
        frames = pixels.reshape(batch, count * TIME_STRIDE, *pixels.shape[2:])
        return frames, after
