"""Sizes of the models that ship: the networks that the scripts make, and the files that they write."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from turboserve.experiments.toyworld import scenery, world
from turboserve.worker.model.toy_vae import ToyVae
from turboserve.worker.model.toyworld import WEIGHTS, ToyWorld
from turboserve.worker.model.transformer import CausalWanTransformer

LATENTS = 8
"""Cells of a latent frame, across and down."""


@dataclass(frozen=True)
class Size:
    """One model, by its differences from toyworld, from whose weights the scripts begin.

    All sizes share toyworld's encoder, and so its latents, and its text encoder.
    """

    weights: Path
    """The file that ships."""
    transformer: Mapping[str, int] = field(default_factory=dict)
    """Fields of `ModelConfig`. With any, the transformer begins with random weights."""
    decoder: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `ToyVae` for the decoder. With any, the decoder's parts of other shapes begin anew."""


SIZES = {
    "toyworld": Size(WEIGHTS),
    "toyworld-small": Size(
        WEIGHTS.with_name("toyworld-small.safetensors"),
        {"dim": 128, "ffn_dim": 384, "num_heads": 4, "num_layers": 4},
        {
            "fine": 2,
            "picture": {
                "channels": 32,
                "frame_channels": 24,
                "landscapes": len(world.BACKGROUNDS),
                "size": world.PIXELS,
                "patch": 2,
            },
        },
    ),
}


def transformer_of(size: Size, shipped: ToyWorld) -> CausalWanTransformer:
    """Return toyworld's transformer, or one of this size with random weights."""
    if not size.transformer:
        return shipped.transformer
    return CausalWanTransformer(dataclasses.replace(shipped.config, **size.transformer))


def vae_config(size: Size, shipped: ToyWorld) -> dict[str, Any]:
    """Return the arguments of `ToyVae` of this size."""
    return {**shipped.details["vae"], **size.decoder}


def vae_of(size: Size, shipped: ToyWorld) -> ToyVae:
    """Return the VAE of this size: toyworld's weights where they fit, and landscapes of its pixels."""
    vae = ToyVae(**vae_config(size, shipped))
    if not size.decoder:
        vae.load_state_dict(shipped.vae.state_dict())
        return vae
    state = vae.state_dict()
    for name, value in shipped.vae.state_dict().items():
        if name in state and state[name].shape == value.shape:
            state[name] = value
    state["decoder_out.landscapes"] = at_pixels(scenery.landscapes(), vae)
    # Most pixels have no figure.
    state["decoder_out.out.bias"].view(4, -1)[3].fill_(-2.0)
    vae.load_state_dict(state)
    return vae


def at_pixels(pictures: torch.Tensor, vae: ToyVae) -> torch.Tensor:
    """Return pictures [..., 3, 128, 128] at the size that the VAE decodes to, as means of pixels."""
    factor = scenery.SIZE // (LATENTS * vae.pixels_per_latent)
    if factor == 1:
        return pictures
    return F.avg_pool2d(pictures.flatten(0, -4), factor).unflatten(0, pictures.shape[:-3])
