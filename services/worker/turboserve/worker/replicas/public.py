"""Load public 1.3 B models for the engine: Self-Forcing and LongLive 1."""

from __future__ import annotations

import dataclasses

import torch

from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfigError, Rotation
from turboserve.worker.model.decoders import load_decoder
from turboserve.worker.model.presets import UnknownPresetError, preset
from turboserve.worker.model.public import CONTAINERS, PublicFiles, load_transformer
from turboserve.worker.model.umt5 import load_text_encoder
from turboserve.worker.model.weights import weights_digest


def load_public(
    name: str,
    files: PublicFiles,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rotation: Rotation | None = None,
) -> Models:
    """Load the models of a preset. `rotation` None: as the preset has it.

    Raises `UnknownPresetError`, `UnreadableCheckpointError`, `CheckpointError`, `ModelConfigError` or
    `TextEncoderUnavailableError`.
    """
    if name not in CONTAINERS:
        raise UnknownPresetError(name)
    config = preset(name)
    if rotation is not None:
        config = dataclasses.replace(config, rotation=rotation)
    text = load_text_encoder(files.text_encoder, device, dtype, config.text_len)
    if text.width != config.text_dim:
        raise ModelConfigError(
            f"text encoder: width {text.width} must be the transformer's text_dim ({config.text_dim})"
        )
    transformer = load_transformer(config, files, device, dtype, CONTAINERS[name])
    decoder = load_decoder(files.vae, config, device, dtype)
    # The digest covers the weights as they compute: with the adapter merged, in the type that they run in.
    digest = weights_digest({"transformer": transformer, "text": text.network, "vae": decoder.network})
    return Models(transformer, text, decoder, digest)
