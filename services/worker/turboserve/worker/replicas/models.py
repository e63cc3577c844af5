"""Models by name: those that ship with the worker, and those that other distributions install.

A distribution offers a model under the entry-point group `turboserve.models`:

    [project.entry-points."turboserve.models"]
    my-model = "my_package:load"

The object is called with `ModelOptions` and returns the networks, as `tensor_backend.Models`.
`replicas.contract` checks what the engine relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from turboserve.plugins import Plugins

if TYPE_CHECKING:
    # Torch takes seconds to import, and settings need only the names.
    import torch

    from turboserve.worker.engine.models import Models


class MissingFileError(ValueError):
    """A model lacks one of its files. The message names the variable for its path."""

    def __init__(self, model: str, setting: str) -> None:
        super().__init__(f"TURBOSERVE_{setting.upper()}: model {model} needs it")
        self.setting = setting


class InvalidModelError(ValueError):
    """A distribution's function returned something that is no model. A retry fails again."""


@dataclass(frozen=True)
class ModelOptions:
    """Where a model runs, and the files that the worker's settings of the same names state."""

    device: torch.device
    dtype: torch.dtype
    """Type of the weights."""
    model_weights: Path | None = None
    checkpoint: Path | None = None
    checkpoint_container: str | None = None
    lora: Path | None = None
    vae: Path | None = None
    text_encoder: str | None = None
    rotation: Literal["absolute", "window"] | None = None
    """How keys carry their position. None: as the model was published."""


LoadModel = Callable[[ModelOptions], "Models"]


def _toyworld(options: ModelOptions) -> Models:
    from turboserve.worker.replicas.toyworld import load_toyworld

    return load_toyworld(options.device, options.model_weights)


def _toyworld_live(options: ModelOptions) -> Models:
    from turboserve.worker.model.presets import with_single_frames

    models = _toyworld(options)
    models.transformer.config = with_single_frames(models.transformer.config)
    return models


def _public(name: str, options: ModelOptions) -> Models:
    from turboserve.worker.model.public import PublicFiles
    from turboserve.worker.replicas.public import load_public

    if options.checkpoint is None:
        raise MissingFileError(name, "checkpoint")
    if options.vae is None:
        raise MissingFileError(name, "vae")
    if options.text_encoder is None:
        raise MissingFileError(name, "text_encoder")
    files = PublicFiles(
        checkpoint=options.checkpoint,
        vae=options.vae,
        text_encoder=options.text_encoder,
        lora=options.lora,
        container=options.checkpoint_container,
    )
    return load_public(name, files, options.device, options.dtype, options.rotation)


MODELS: Plugins[LoadModel] = Plugins(
    "model",
    "turboserve.models",
    {
        "toyworld": _toyworld,
        "toyworld-live": _toyworld_live,
        "self-forcing-1-3b": partial(_public, "self-forcing-1-3b"),
        "longlive-1-3b": partial(_public, "longlive-1-3b"),
    },
)
"""The function that loads each model, by the model's name in settings and requests."""


def load_model(name: str, options: ModelOptions) -> Models:
    """Load the networks of this name.

    Raises `NotInstalledError`, `PluginLoadError`, `InvalidModelError` for a distribution that returns no
    model or one without a digest of its weights, `MissingFileError`, and any error of the model's function.
    """
    from turboserve.worker.engine.models import Models

    loaded = MODELS.load(name)(options)
    if not isinstance(loaded, Models):
        raise InvalidModelError(f"model {name}: its function returned {type(loaded).__name__}, not Models")
    if not loaded.weights:
        raise InvalidModelError(
            f"model {name}: Models.weights is empty; workers compare it before they exchange sessions"
        )
    return loaded
