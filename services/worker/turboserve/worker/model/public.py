"""Load public 1.3 B models for the engine: Self-Forcing and LongLive 1, from their authors' files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from turboserve.worker.engine.tensor_backend import Models
from turboserve.worker.model.config import ModelConfig, ModelConfigError, Rotation
from turboserve.worker.model.decoders import load_decoder
from turboserve.worker.model.load import load_state, read_checkpoint
from turboserve.worker.model.lora import merge_lora, read_lora
from turboserve.worker.model.naming import transformer_names
from turboserve.worker.model.presets import UnknownPresetError, preset
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.model.umt5 import load_text_encoder
from turboserve.worker.model.weights import weights_digest

_CONTAINERS = {
    # As in the authors' own inference: Self-Forcing uses the averaged weights, LongLive the last ones.
    "self-forcing-1.3b": ("generator_ema", "generator", "model"),
    "longlive-1.3b": ("generator", "model", "generator_ema"),
}
_SUBFOLDER = "transformer"


@dataclass(frozen=True)
class PublicFiles:
    """Locations of a public model's parts."""

    checkpoint: Path
    """The transformer: `.pt`, `.safetensors`, an index of several, or a folder with one of them."""
    vae: Path
    """See `load_decoder`."""
    text_encoder: Path | str
    """See `load_text_encoder`."""
    lora: Path | None = None
    """Adapter that is merged into the transformer. LongLive is incomplete without it."""
    container: str | None = None
    """The dictionary of a `.pt` file to load. None: the one that the model's authors run."""


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
    if name not in _CONTAINERS:
        raise UnknownPresetError(name)
    config = preset(name)
    if rotation is not None:
        config = dataclasses.replace(config, rotation=rotation)
    text = load_text_encoder(files.text_encoder, device, dtype, config.text_len)
    if text.width != config.text_dim:
        raise ModelConfigError(
            f"text encoder: width {text.width} must be the transformer's text_dim ({config.text_dim})"
        )
    transformer = load_transformer(config, files, device, dtype, _CONTAINERS[name])
    decoder = load_decoder(files.vae, config, device, dtype)
    # The digest covers the weights as they compute: with the adapter merged, in the type that they run in.
    digest = weights_digest({"transformer": transformer, "text": text.network, "vae": decoder.network})
    return Models(transformer, text, decoder, digest)


def load_transformer(
    config: ModelConfig,
    files: PublicFiles,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    containers: tuple[str, ...] = _CONTAINERS["self-forcing-1.3b"],
) -> CausalWanTransformer:
    """The transformer, with its adapter merged if there is one. `containers`: dictionaries to look for.

    The file is mapped, not read: beside the model itself, at most one tensor is in memory at a time. Merged
    tensors are in `dtype` at once.
    """
    path = files.checkpoint
    if (path / _SUBFOLDER).is_dir():
        path = path / _SUBFOLDER
    state = transformer_names(read_checkpoint(path, files.container, containers))
    if files.lora is not None:
        state = merge_lora(state, read_lora(files.lora), dtype=dtype)
    with torch.device("meta"):
        model = CausalWanTransformer(config)
    load_state(model, state)
    return model.to(device, dtype)
