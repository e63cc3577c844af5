"""Read the transformer of public 1.3 B models: Self-Forcing and LongLive 1, from their authors' files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.load import load_state, read_checkpoint, without_values
from turboserve.worker.model.lora import merge_lora, read_lora
from turboserve.worker.model.naming import transformer_names
from turboserve.worker.model.transformer import CausalWanTransformer

CONTAINERS = {
    # As in the authors' own inference: Self-Forcing uses the averaged weights, LongLive the last ones.
    "self-forcing-1-3b": ("generator_ema", "generator", "model"),
    "longlive-1-3b": ("generator", "model", "generator_ema"),
}
"""Preset → dictionaries of a `.pt` file, in the order in which they are looked for."""
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
    fast_vae: Path | None = None
    """A second, faster decoder of the same latents: see `load_decoder`. None: there is one decoder."""


def load_transformer(
    config: ModelConfig,
    files: PublicFiles,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    containers: tuple[str, ...] = CONTAINERS["self-forcing-1-3b"],
    *,
    values: bool = True,
) -> CausalWanTransformer:
    """The transformer, with its adapter merged if there is one. `containers`: dictionaries to look for.
    Without `values`, the weights are left undefined.

    The file is mapped, not read: beside the model itself, at most one tensor is in memory at a time. Merged
    tensors are in `dtype` at once.
    """
    path = files.checkpoint
    if (path / _SUBFOLDER).is_dir():
        path = path / _SUBFOLDER
    state = transformer_names(read_checkpoint(path, files.container, containers))
    if not values:
        state = without_values(state)
    elif files.lora is not None:
        state = merge_lora(state, read_lora(files.lora), dtype=dtype)
    with torch.device("meta"):
        model = CausalWanTransformer(config)
    load_state(model, state)
    return model.to(device, dtype)
