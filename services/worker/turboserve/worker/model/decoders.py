"""Load public VAE files as the engine's `Decoder`: Wan 2.1's VAE under either naming, or TAEHV."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from turboserve.worker.model.config import ModelConfig, ModelConfigError
from turboserve.worker.model.load import (
    UnreadableCheckpointError,
    load_state,
    read_checkpoint,
    without_values,
)
from turboserve.worker.model.naming import renamed, wan_vae
from turboserve.worker.model.taehv import Taehv, TaehvConfig, TaehvDecoder
from turboserve.worker.model.wan_vae import WanDecoder, WanVae
from turboserve.worker.model.wan_vae_config import WanVaeConfig

_SUBFOLDER = "vae"
_TAEHV_MARK = "decoder.3.conv.0.weight"
_ORIGINAL_MARK = "decoder.conv1.weight"


def load_decoder(
    path: Path,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: WanVaeConfig | TaehvConfig | None = None,
    *,
    values: bool = True,
) -> WanDecoder | TaehvDecoder:
    """Load a decoder for the latents of a transformer with `config`. The tensors' names identify the format.

    `path`: `Wan2.1_VAE.pth`, `taew2_1.pth` or its `.safetensors`, a file or folder of diffusers'
    `AutoencoderKLWan`, or a folder that has one in `vae`. `sizes`: sizes of a model other than the public
    ones; a folder's `config.json` also gives them. Without `values`, the weights are left undefined. Raises
    `UnreadableCheckpointError`, `CheckpointError` or `ModelConfigError`.
    """
    if (path / _SUBFOLDER).is_dir():
        path = path / _SUBFOLDER
    state = read_checkpoint(path)
    if not values:
        state = without_values(state)
    height, width = config.latent_height, config.latent_width
    if _TAEHV_MARK in state:
        tiny_sizes = sizes if isinstance(sizes, TaehvConfig) else TaehvConfig()
        _require_fit(tiny_sizes.latent_channels, tiny_sizes.frames_per_latent, config)
        tiny = load_taehv(state, tiny_sizes)
        return TaehvDecoder(tiny.to(device, dtype), height, width)
    wan_sizes = sizes if isinstance(sizes, WanVaeConfig) else _sizes(path)
    _require_fit(wan_sizes.z_dim, 2 ** sum(wan_sizes.temporal_downsample), config)
    vae = load_wan_vae(state, wan_sizes)
    return WanDecoder(vae.to(device, dtype), height, width)


def load_wan_vae(state: dict[str, Tensor], sizes: WanVaeConfig) -> WanVae:
    """The decoding half of a Wan VAE, under either naming. Raises `CheckpointError`."""
    if _ORIGINAL_MARK in state:
        names = wan_vae(len(sizes.dim_mult), sizes.res_blocks)
        state = renamed(_without(state, ("encoder.", "conv1.")), names.there)
    with torch.device("meta"):
        vae = WanVae(sizes)
    load_state(vae, _without(state, ("encoder.", "quant_conv.")))
    return vae


def load_taehv(state: dict[str, Tensor], sizes: TaehvConfig) -> Taehv:
    """The decoding half of TAEHV. Raises `CheckpointError`."""
    with torch.device("meta"):
        model = Taehv(sizes)
    load_state(model, model.fitted(_without(state, ("encoder.",))))
    return model


def _require_fit(channels: int, frames: int, config: ModelConfig) -> None:
    for what, found, needed in (
        ("latent channels", channels, config.out_dim),
        ("frames per latent", frames, config.frames_per_latent),
    ):
        if found != needed:
            raise ModelConfigError(f"vae {what}: {found} must be the transformer's {needed}")


def _without(state: dict[str, Tensor], prefixes: Iterable[str]) -> dict[str, Tensor]:
    """The state without names that begin with `prefixes`: a server does not use the encoding half."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(tuple(prefixes))}


def _sizes(path: Path) -> WanVaeConfig:
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    if not file.is_file():
        return WanVaeConfig()
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UnreadableCheckpointError(f"{file}: {error}") from error
    if not isinstance(values, dict):
        raise UnreadableCheckpointError(f"{file}: not a JSON object")
    # In a folder of several models, `config.json` may belong to another model than the VAE's file.
    return WanVaeConfig.from_mapping(values) if "latents_mean" in values or path.is_dir() else WanVaeConfig()
