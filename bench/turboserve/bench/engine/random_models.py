"""Models of public sizes with random weights, served as any other model: time does not depend on weights.

`random-longlive-1-3b` has LongLive's transformer and TAEHV at 480p, and one embedding for every prompt. Its
video shows noise, so it does not keep the contract of models that show something. It needs no files.
"""

from __future__ import annotations

import dataclasses

from turboserve.bench.engine.models import PUBLIC_DECODERS, random_models
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.presets import preset
from turboserve.worker.model.taehv import TaehvConfig
from turboserve.worker.replicas.models import ModelOptions

NAME = "random-longlive-1-3b"
TINY = "random-tiny"
TINY_CONFIG = ModelConfig(
    dim=48,
    ffn_dim=96,
    num_heads=2,
    num_layers=2,
    text_dim=12,
    text_len=5,
    latent_height=8,
    latent_width=8,
    freq_dim=32,
    local_attn_size=12,
    sink_size=3,
)


def load(options: ModelOptions) -> Models:
    """Build `random-longlive-1-3b`. All workers build the same weights."""
    models = random_models(preset("longlive-1-3b"), PUBLIC_DECODERS["taehv"], options.device, options.dtype)
    return dataclasses.replace(models, weights=NAME)


def load_tiny(options: ModelOptions) -> Models:
    """Build `random-tiny`, to try a benchmark without a GPU."""
    models = random_models(TINY_CONFIG, TaehvConfig(widths=(16, 8, 8, 8)), options.device, options.dtype)
    return dataclasses.replace(models, weights=TINY)
