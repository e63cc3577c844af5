"""Models by name: those that ship with the worker, and those that other distributions install.

A distribution offers a model under the entry-point group `turboserve.models`:

    [project.entry-points."turboserve.models"]
    my-model = "my_package:load"

The object is called with `ModelOptions` and returns the networks, as `tensor_backend.Models`.
`replicas.contract` checks what the engine relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from turboserve.allocation.classes import CLASSES_LIMIT, SessionClass
from turboserve.plugins import Plugins

if TYPE_CHECKING:
    # Torch takes seconds to import, and settings need only the names.
    import torch

    from turboserve.worker.engine.models import Models
    from turboserve.worker.replicas.weight_filler import WeightFiller


class MissingFileError(ValueError):
    """A model lacks one of its files. The message names the variable for its path."""

    def __init__(self, model: str, setting: str) -> None:
        super().__init__(f"TURBOSERVE_{setting.upper()}: model {model} needs it")
        self.setting = setting


class FrameSizeError(ValueError):
    """A model does not offer the frame size that its name asks for. A retry fails again."""


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
    fast_vae: Path | None = None
    text_encoder: str | None = None
    rotation: Literal["absolute", "window"] | None = None
    """How keys carry their position. None: as the model was published."""
    frame_size: tuple[int, int] | None = None
    """Width and height of a frame, pixels: see `ModelConfig.with_frame_size`. None: the model's own."""
    filler: WeightFiller | None = None
    """Brings the weights from other workers, if the model's function can do without those of its files."""


LoadModel = Callable[[ModelOptions], "Models"]


def _toyworld(name: str, options: ModelOptions) -> Models:
    from turboserve.worker.model.presets import SHIPPED, preset
    from turboserve.worker.replicas.toyworld import load_toyworld

    if options.frame_size is not None:
        preset(name).with_frame_size(options.frame_size)
    return load_toyworld(options.device, options.model_weights or SHIPPED[name], options.filler)


def _toyworld_live(options: ModelOptions) -> Models:
    from turboserve.worker.model.presets import with_single_frames

    models = _toyworld("toyworld-live", options)
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
        fast_vae=options.fast_vae,
    )
    return load_public(
        name, files, options.device, options.dtype, options.rotation, options.filler, options.frame_size
    )


MODELS: Plugins[LoadModel] = Plugins(
    "model",
    "turboserve.models",
    {
        "toyworld": partial(_toyworld, "toyworld"),
        "toyworld-live": _toyworld_live,
        "toyworld-small": partial(_toyworld, "toyworld-small"),
        "self-forcing-1-3b": partial(_public, "self-forcing-1-3b"),
        "longlive-1-3b": partial(_public, "longlive-1-3b"),
    },
)
"""The function that loads each model, by the model's name in settings and requests."""


def check_model(name: str) -> str:
    """Return the name of a class (`SessionClass.of_name`) whose model is installed.

    Raises `NotInstalledError`, and `InvalidModelError` for an installed model whose own name ends in a size.
    """
    wanted = SessionClass.of_name(name)
    if wanted.width and name in MODELS.names:
        raise InvalidModelError(f"model {name}: the name of a model must not end in a frame size")
    MODELS.check(wanted.model)
    return name


def check_models(names: str) -> str:
    """Return the names of classes, with commas between them.

    Raises the errors of `check_model`, and `InvalidModelError` for a name that is empty or appears twice.
    """
    each = names.split(",")
    for name in each:
        if not name:
            raise InvalidModelError(f"{name!r} is not the name of a model")
        check_model(name)
    if len(set(each)) < len(each):
        raise InvalidModelError(f"{names}: a model appears twice")
    if len(each) > CLASSES_LIMIT:
        raise InvalidModelError(f"{len(each)} models, at most {CLASSES_LIMIT}")
    return names


def load_model(name: str, options: ModelOptions) -> Models:
    """Load the networks of this name, for the frame size that it ends in (`SessionClass.of_name`).

    Raises `NotInstalledError`, `PluginLoadError`, `InvalidModelError` for a distribution that returns no
    model or one without a digest of its weights, `MissingFileError`, `FrameSizeError`, and any error of the
    model's function.
    """
    from turboserve.worker.engine.models import Models
    from turboserve.worker.model.config import ModelConfigError

    wanted = SessionClass.of_name(name)
    size = (wanted.width, wanted.height) if wanted.width else None
    try:
        loaded = MODELS.load(wanted.model)(replace(options, frame_size=size))
    except ModelConfigError as error:
        if size is None:
            raise
        raise FrameSizeError(f"TURBOSERVE_MODEL: {name}: {error}") from error
    if not isinstance(loaded, Models):
        raise InvalidModelError(f"model {name}: its function returned {type(loaded).__name__}, not Models")
    if not loaded.weights:
        raise InvalidModelError(
            f"model {name}: Models.weights is empty; workers compare it before they exchange sessions"
        )
    made = loaded.transformer.config.frame_size
    if size is not None and made != size:
        raise FrameSizeError(
            f"TURBOSERVE_MODEL: {name}: {wanted.model} has frames of {made[0]}x{made[1]} only"
        )
    return loaded
