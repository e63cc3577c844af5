"""Configurations by name: the public 1.3 B models at 832×480, and the models that ship with the worker."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.load import UnreadableCheckpointError

_SELF_FORCING = ModelConfig(
    dim=1536,
    ffn_dim=8960,
    num_heads=12,
    num_layers=30,
    text_dim=4096,
    text_len=512,
    latent_height=60,
    latent_width=104,
)
_PUBLIC = {
    "self-forcing-1-3b": _SELF_FORCING,
    "longlive-1-3b": dataclasses.replace(_SELF_FORCING, local_attn_size=12, sink_size=3),
}
_WEIGHTS = Path(__file__).parent.parent / "weights"
SHIPPED = {
    "toyworld": _WEIGHTS / "toyworld.safetensors",
    "toyworld-live": _WEIGHTS / "toyworld.safetensors",
    "toyworld-small": _WEIGHTS / "toyworld-small.safetensors",
}
"""Weights files of the models that ship with the worker, by name."""

NAMES = (*_PUBLIC, *SHIPPED)
"""Names of all presets."""


class UnknownPresetError(ValueError):
    """No preset has this name. The message lists the names."""

    def __init__(self, name: str, names: Iterable[str] = NAMES) -> None:
        super().__init__(f"model: {name!r} is not one of {', '.join(names)}")
        self.name = name


def known(name: str) -> str:
    """Return the name. Raises `UnknownPresetError`."""
    if name not in NAMES:
        raise UnknownPresetError(name)
    return name


def preset(name: str) -> ModelConfig:
    """The configuration of this name. A shipped model's configuration is read from its weights file.

    Raises `UnknownPresetError`, and `UnreadableCheckpointError` if a shipped weights file is missing or
    damaged.
    """
    if name in _PUBLIC:
        return _PUBLIC[name]
    path = SHIPPED[known(name)]
    try:
        with safe_open(path, "pt") as file:
            details = json.loads((file.metadata() or {})["config"])
        config = ModelConfig.from_mapping(details["transformer"])
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise UnreadableCheckpointError(f"{path}: {error!r}") from error
    return with_single_frames(config) if name == "toyworld-live" else config


def with_single_frames(config: ModelConfig) -> ModelConfig:
    """The configuration with chunks of one latent frame, and the first one of a session as sink.

    Of the shipped models, toyworld's weights are trained for both sizes of chunks.
    """
    return dataclasses.replace(config, frames_per_chunk=1, sink_size=1)
