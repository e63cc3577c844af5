"""Streaming decoder of the Wan 2.1 VAE. The past of its convolutions belongs to the session, not the module.

Names of parameters are those of diffusers' `AutoencoderKLWan`. A causal convolution over time needs the two
frames before its input; a session begins with zeros there. Latent frames are decoded one at a time. The first
gives 1 pixel frame, because doubling in time is skipped for it, and each other gives 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.streaming import Cache, keep, stacked
from turboserve.worker.model.wan_vae_config import WanVaeConfig
from turboserve.worker.model.weights import weight_bytes

_PAST = 2
"""Number of earlier frames that a convolution over time needs."""


class _Stream:
    """The rows' caches while a latent frame is decoded: every convolution's past, replaced one by one."""

    def __init__(self, rows: int, before: Sequence[Mapping[str, Tensor]] | None) -> None:
        self.first = before is None
        self.after: list[Cache] = [{} for _ in range(rows)]
        self._before = before or ()

    def precede(self, name: str, x: Tensor) -> Tensor:
        """x [B, C, T, H, W] with the two frames before it: [B, C, 2 + T, H, W]."""
        past = self.nothing(x) if self.first else stacked(self._before, name)
        x = torch.cat((past, x), 2)
        keep(self.after, name, x[:, :, -_PAST:])
        return x

    def nothing(self, x: Tensor) -> Tensor:
        """The past of a convolution that has seen no frame."""
        return x.new_zeros(*x.shape[:2], _PAST, *x.shape[3:])


class _CausalConv(nn.Conv3d):
    """Convolution over time and space, whose padding in time is the past."""

    name = ""
    """Key of the convolution's past in a session's cache."""

    def __init__(self, inputs: int, outputs: int, space: int = 3) -> None:
        super().__init__(inputs, outputs, (3, space, space), padding=(0, space // 2, space // 2))

    def streamed(self, x: Tensor, stream: _Stream) -> Tensor:
        out: Tensor = self(stream.precede(self.name, x))
        return out


class _Norm(nn.Module):
    """Vectors of channels scaled to a root mean square of 1."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * dims))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype.itemsize < 4 else x
        unit = F.normalize(wide, dim=1).to(x.dtype)
        return unit * (math.sqrt(x.shape[1]) * self.gamma)


def _frames(x: Tensor) -> Tensor:
    """[B, C, T, H, W] → [B·T, C, H, W]."""
    return x.movedim(2, 1).flatten(0, 1)


def _video(frames: Tensor, batch: int) -> Tensor:
    """[B·T, C, H, W] → [B, C, T, H, W]."""
    return frames.reshape(batch, -1, *frames.shape[1:]).movedim(1, 2)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = _Norm(inputs, 3)
        self.conv1 = _CausalConv(inputs, outputs)
        self.norm2 = _Norm(outputs, 3)
        self.conv2 = _CausalConv(outputs, outputs)
        self.conv_shortcut = nn.Identity() if inputs == outputs else nn.Conv3d(inputs, outputs, 1)

    def forward(self, x: Tensor, stream: _Stream) -> Tensor:
        h = self.conv1.streamed(F.silu(self.norm1(x)), stream)
        h = self.conv2.streamed(F.silu(self.norm2(h)), stream)
        out: Tensor = self.conv_shortcut(x) + h
        return out


class _Attention(nn.Module):
    """Attention of one head over the pixels of one frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _Norm(channels, 2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        frames = _frames(x)
        q, k, v = self.to_qkv(self.norm(frames)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
        h = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + _video(self.proj(h.reshape(frames.shape)), x.shape[0])


class _Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Residual(channels, channels) for _ in range(2))
        self.attentions = nn.ModuleList([_Attention(channels)])

    def forward(self, x: Tensor, stream: _Stream) -> Tensor:
        x = self.attentions[0](self.resnets[0](x, stream))
        out: Tensor = self.resnets[1](x, stream)
        return out


class _Upsample(nn.Module):
    """Twice the size in space, half the channels; with `in_time` also twice the frames."""

    def __init__(self, channels: int, in_time: bool) -> None:
        super().__init__()
        # diffusers has the parameterless resize at index 0.
        self.resample = nn.Sequential(nn.Identity(), nn.Conv2d(channels, channels // 2, 3, padding=1))
        self.time_conv = _CausalConv(channels, 2 * channels, space=1) if in_time else None

    def forward(self, x: Tensor, stream: _Stream) -> Tensor:
        if self.time_conv is not None:
            if stream.first:
                keep(stream.after, self.time_conv.name, stream.nothing(x))
            else:
                first, second = self.time_conv.streamed(x, stream).chunk(2, 1)
                x = torch.stack((first, second), 3).flatten(2, 3)
        frames = F.interpolate(_frames(x), scale_factor=2.0, mode="nearest")
        return _video(self.resample(frames), x.shape[0])


class _Level(nn.Module):
    def __init__(self, inputs: int, outputs: int, res_blocks: int, upsample: bool, in_time: bool) -> None:
        super().__init__()
        widths = [inputs, *(outputs for _ in range(res_blocks + 1))]
        self.resnets = nn.ModuleList(_Residual(a, b) for a, b in pairwise(widths))
        self.upsamplers = nn.ModuleList([_Upsample(outputs, in_time)] if upsample else [])

    def forward(self, x: Tensor, stream: _Stream) -> Tensor:
        for part in (*self.resnets, *self.upsamplers):
            x = part(x, stream)
        return x


class _Decoder(nn.Module):
    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        multiples = config.dim_mult[::-1]
        widths = [config.decoder_dim * multiple for multiple in (multiples[0], *multiples)]
        last = len(multiples) - 1
        in_time = (*config.temporal_downsample[::-1], False)
        self.conv_in = _CausalConv(config.z_dim, widths[0])
        self.mid_block = _Middle(widths[0])
        self.up_blocks = nn.ModuleList(
            # The upsampling of the level before halves the channels, except before the first level.
            _Level(before // (2 if i else 1), width, config.res_blocks, i < last, in_time[i])
            for i, (before, width) in enumerate(pairwise(widths))
        )
        self.norm_out = _Norm(widths[-1], 3)
        self.conv_out = _CausalConv(widths[-1], config.out_channels)

    def forward(self, x: Tensor, stream: _Stream) -> Tensor:
        x = self.mid_block(self.conv_in.streamed(x, stream), stream)
        for level in self.up_blocks:
            x = level(x, stream)
        return self.conv_out.streamed(F.silu(self.norm_out(x)), stream)


class WanVae(nn.Module):
    """The VAE without its encoder."""

    def __init__(self, config: WanVaeConfig) -> None:
        super().__init__()
        self.config = config
        self.post_quant_conv = nn.Conv3d(config.z_dim, config.z_dim, 1)
        self.decoder = _Decoder(config)
        for name, module in self.decoder.named_modules():
            if isinstance(module, _CausalConv):
                module.name = name

    def decode(
        self, latents: Tensor, caches: Sequence[Mapping[str, Tensor]] | None = None
    ) -> tuple[Tensor, list[Cache]]:
        """latents [B, F, C, h, w], not normalized → (frames [B, N, 3, H, W] in -1..1, each row's cache for
        the next call).

        Without caches all rows begin a video. The given caches are not changed.
        """
        made = []
        raw = self.post_quant_conv(latents.transpose(1, 2))
        for latent in raw.split(1, 2):
            stream = _Stream(len(latents), caches)
            made.append(self.decoder(latent, stream).transpose(1, 2).clamp(-1.0, 1.0))
            caches = stream.after
        return torch.cat(made, 1), [dict(cache) for cache in caches or ()]

    def cache_numbers(self, height: int, width: int) -> int:
        """Number of elements of one session's cache, for latents of this size."""
        total, scale = self.decoder.conv_in.in_channels, 1
        parts: list[nn.Module] = [self.decoder.mid_block, *self.decoder.up_blocks, self.decoder.conv_out]
        for part in parts:
            convs = [module for module in part.modules() if isinstance(module, _CausalConv)]
            total += scale * sum(conv.in_channels for conv in convs)
            scale *= 4 if any(isinstance(module, _Upsample) for module in part.modules()) else 1
        return _PAST * total * height * width

    def workspace_numbers(self, height: int, width: int) -> int:
        """Largest number of elements while decoding beside the cache, as measured: 14 times a latent frame at
        full width."""
        space = 1 << 2 * (len(self.config.dim_mult) - 1)
        time = 1 << sum(self.config.temporal_downsample)
        return 14 * time * space * height * width * self.config.decoder_dim


class WanDecoder:
    """The engine's `Decoder` over the VAE: takes the transformer's latents, and returns pixels."""

    def __init__(self, vae: WanVae, height: int, width: int) -> None:
        """`height`, `width`: size of a latent frame."""
        self._vae = vae
        weight = vae.post_quant_conv.weight
        self._mean, self._std = (
            torch.tensor(values, device=weight.device).view(-1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        self.cache_bytes = vae.cache_numbers(height, width) * weight.element_size()
        """Bytes of one session's cache."""
        self.weight_bytes = weight_bytes(vae)
        """See `Decoder.weight_bytes`."""
        self.workspace_bytes = vae.workspace_numbers(height, width) * weight.element_size()
        """See `Decoder.workspace_bytes`."""

    @property
    def network(self) -> WanVae:
        """The decoding network."""
        return self._vae

    @torch.inference_mode()
    def decode(self, latents: Tensor, caches: Sequence[Cache] | None) -> tuple[Tensor, list[Cache]]:
        """See `Decoder.decode`."""
        raw = latents.float() * self._std + self._mean
        frames, after = self._vae.decode(raw.to(self._vae.post_quant_conv.weight.dtype), caches)
        pixels = (frames.movedim(2, -1).float() + 1.0) * 127.5
        return pixels.round().clamp(0, 255).to(torch.uint8), after
