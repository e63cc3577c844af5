"""TAEHV, a tiny streaming decoder of the same latents (madebyollin/taehv; `taew2_1` for Wan 2.1).

Names of parameters are those of the public weights. Each memory block reads the frame before its input. These
frames are the whole cache of a session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.streaming import Cache, keep, stacked
from turboserve.worker.model.weights import weight_bytes


@dataclass(frozen=True)
class TaehvConfig:
    """Sizes of the decoder, by default those of `taew2_1`."""

    latent_channels: int = 16
    widths: tuple[int, int, int, int] = (256, 128, 64, 64)
    """Input channels of the three levels, and output channels of the last level."""
    time_upscale: tuple[bool, bool, bool] = (False, True, True)
    """Whether each level doubles the frames."""
    memory_blocks: int = 3
    """Number of memory blocks of each level."""

    @property
    def frames_per_latent(self) -> int:
        """Number of pixel frames of each latent frame; of a session's first, all but the last are dropped."""
        return int(2 ** sum(self.time_upscale))


class _Clamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3.0) * 3.0


class _MemoryBlock(nn.Module):
    """Residual block over each frame and the frame before it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        """x [B·T, C, H, W], last [B, C, H, W] → x's shape."""
        frames = torch.unflatten(x, 0, (len(last), -1))
        before = torch.cat((last.unsqueeze(1), frames[:, :-1]), 1).flatten(0, 1)
        return F.relu(x + self.conv(torch.cat((x, before), 1)))


class _Grow(nn.Module):
    """Expands each frame to `stride` frames."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(channels, stride * channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.conv(x)
        return grown.reshape(-1, x.shape[1], *x.shape[2:])


class Taehv(nn.Module):
    """The decoder. It takes normalized latents, as the transformer generates them."""

    def __init__(self, config: TaehvConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.widths
        layers: list[nn.Module] = [
            _Clamp(),
            nn.Conv2d(config.latent_channels, widths[0], 3, padding=1),
            nn.ReLU(),
        ]
        for width, next_width, doubles in zip(widths, widths[1:], config.time_upscale, strict=False):
            layers += [_MemoryBlock(width) for _ in range(config.memory_blocks)]
            layers += [nn.Upsample(scale_factor=2.0), _Grow(width, 2 if doubles else 1)]
            layers += [nn.Conv2d(width, next_width, 3, padding=1, bias=False)]
        layers += [nn.ReLU(), nn.Conv2d(widths[-1], 3, 3, padding=1)]
        self.decoder = nn.Sequential(*layers)

    def decode(
        self, latents: Tensor, caches: Sequence[Mapping[str, Tensor]] | None = None
    ) -> tuple[Tensor, list[Cache]]:
        """latents [B, F, C, h, w] → (frames [B, N, 3, H, W] in 0..1, each row's cache for the next call).

        Without caches all rows begin a video. The given caches are not changed.
        """
        rows = len(latents)
        after: list[Cache] = [{} for _ in range(rows)]
        x = latents.flatten(0, 1)
        for index, layer in enumerate(self.decoder):
            if isinstance(layer, _MemoryBlock):
                name = f"memory{index}"
                newest = torch.unflatten(x, 0, (rows, -1))[:, -1]
                last = torch.zeros_like(newest) if caches is None else stacked(caches, name)
                keep(after, name, newest)
                x = layer(x, last)
            else:
                x = layer(x)
        drop = self.config.frames_per_latent - 1 if caches is None else 0
        return torch.unflatten(x, 0, (rows, -1))[:, drop:].clamp(0.0, 1.0), after

    def cache_numbers(self, height: int, width: int) -> int:
        """Number of elements of one session's cache, for latents of this size."""
        levels = enumerate(self.config.widths[:-1])
        return sum(self.config.memory_blocks * c * (1 << 2 * level) for level, c in levels) * height * width

    def workspace_bytes(self, frames: int, height: int, width: int) -> int:
        """Largest memory of decoding `frames` latent frames beside the cache, in bytes, as measured: 3 times
        the last level's tensors, and the pixels in the weights' type, in float32 and in bytes."""
        size = next(self.parameters()).element_size()
        pixels = frames * self.config.frames_per_latent * height * width << 2 * len(self.config.time_upscale)
        return pixels * (3 * self.config.widths[-1] * size + 3 * (size + 2 * 4 + 1))

    def fitted(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights for this decoder, from weights that may double time at more levels.

        As in the public loader, of a growing layer's output channels those of the last frame are used.
        """
        fitted = dict(state)
        for index, layer in enumerate(self.decoder):
            name = f"decoder.{index}.conv.weight"
            if isinstance(layer, _Grow) and name in fitted:
                needed = layer.conv.out_channels
                if fitted[name].shape[0] == 2 * needed:
                    fitted[name] = fitted[name][-needed:]
        return fitted


class TaehvDecoder:
    """The engine's `Decoder` over TAEHV."""

    def __init__(self, model: Taehv, height: int, width: int, frames_at_once: int = 3) -> None:
        """`height`, `width`: size of a latent frame. `frames_at_once`: latent frames of one forward."""
        self._model = model
        self._at_once = frames_at_once
        weight = next(model.parameters())
        self._dtype = weight.dtype
        self.cache_bytes = model.cache_numbers(height, width) * weight.element_size()
        """Bytes of one session's cache."""
        self.weight_bytes = weight_bytes(model)
        """See `Decoder.weight_bytes`."""
        self.workspace_bytes = model.workspace_bytes(frames_at_once, height, width)
        """See `Decoder.workspace_bytes`."""

    @property
    def network(self) -> Taehv:
        """The decoding network."""
        return self._model

    @torch.inference_mode()
    def decode(self, latents: Tensor, caches: Sequence[Cache] | None) -> tuple[Tensor, list[Cache]]:
        """See `Decoder.decode`."""
        made = []
        for part in torch.split(latents.to(self._dtype), self._at_once, 1):
            frames, caches = self._model.decode(part, caches)
            made.append((frames.movedim(2, -1).float() * 255.0).round().to(torch.uint8))
        return torch.cat(made, 1), list(caches or ())
