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
from turboserve.worker.model.weights import manifest_of
from turboserve.worker.replicas.weight_filler import WeightFiller


def load_public(
    name: str,
    files: PublicFiles,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rotation: Rotation | None = None,
    filler: WeightFiller | None = None,
    frame_size: tuple[int, int] | None = None,
) -> Models:
    """Load the models of a preset. `rotation` None: as the preset has it. With a `filler`, the weights in the
    files are not read. `frame_size`: width and height, pixels; None: the preset's.

    Raises the errors of `WeightFiller.fill`, `UnknownPresetError`, `UnreadableCheckpointError`,
    `CheckpointError`, `ModelConfigError` or `TextEncoderUnavailableError`.
    """
    if name not in CONTAINERS:
        raise UnknownPresetError(name)
    config = preset(name).with_frame_size(frame_size)
    if rotation is not None:
        config = dataclasses.replace(config, rotation=rotation)
    values = filler is None
    text = load_text_encoder(files.text_encoder, device, dtype, config.text_len, values=values)
    if text.width != config.text_dim:
        raise ModelConfigError(
            f"text encoder: width {text.width} must be the transformer's text_dim ({config.text_dim})"
        )
    transformer = load_transformer(config, files, device, dtype, CONTAINERS[name], values=values)
    decoder = load_decoder(files.vae, config, device, dtype, values=values)
    # The manifest is of the weights as they compute: with the adapter merged, in the type that they run in.
    networks = {"transformer": transformer, "text": text.network, "vae": decoder.network}
    fast = None
    if files.fast_vae is not None:
        fast = load_decoder(files.fast_vae, config, device, dtype, values=values)
        networks["fast_vae"] = fast.network
    manifest = manifest_of(networks) if filler is None else filler.fill(networks, "")
    return Models(transformer, text, decoder, manifest.digest, None, manifest, networks, fast)
