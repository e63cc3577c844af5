"""Profiles the stages of the configured model, or of a model of its sizes with random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from turboserve.bench.engine.models import PUBLIC_DECODERS, random_models
from turboserve.bench.engine.stages import profile_stages
from turboserve.worker.engine.errors import AttentionUnavailableError
from turboserve.worker.engine.models import COMPILER, Models
from turboserve.worker.engine.profile_file import ProfileFile
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.presets import preset
from turboserve.worker.service.models import choose_device, choose_dtype, load_models
from turboserve.worker.settings import Settings


class ModelUnavailableError(Exception):
    """The model to be measured is not available; the message states the reason."""


def profile_configured(
    settings: Settings, config_file: Path | None, random: bool, decoder: str, largest: int, repeats: int
) -> ProfileFile:
    """Measure L(b) of every stage. Raises `ModelUnavailableError`.

    Args:
        config_file: A `ModelConfig` as JSON, measured with random weights, as a preset with `random`.
        decoder: The public decoder for a model with random weights.
    """
    try:
        models = _models(settings, config_file, random, decoder)
        compiler = COMPILER if settings.compile else None
        return profile_stages(models, largest, repeats, settings.attention, compiler)
    except (ValueError, OSError, RuntimeError, AssertionError, AttentionUnavailableError) as error:
        raise ModelUnavailableError(f"{type(error).__name__}: {error}") from error


def _models(settings: Settings, config_file: Path | None, random: bool, decoder: str) -> Models:
    if config_file is None and not random:
        return load_models(settings)
    if config_file is None:
        config = preset(settings.model)
        if settings.rotation is not None:
            config = dataclasses.replace(config, rotation=settings.rotation)
    else:
        config = ModelConfig.from_json(config_file.read_text())
    device = choose_device(settings)
    if device.type == "cpu":
        torch.set_num_threads(settings.torch_threads)
    return random_models(config, PUBLIC_DECODERS[decoder], device, choose_dtype(settings, device))
