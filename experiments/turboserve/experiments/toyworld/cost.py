"""The processor time of a chunk of one model that ships, relative to toyworld's."""

from __future__ import annotations

import statistics
import time

from turboserve.experiments.toyworld.quality import seconds_per_chunk
from turboserve.worker.engine.models import Models
from turboserve.worker.model.presets import SHIPPED
from turboserve.worker.model.toyworld import ToyDecoder, read_toyworld

ROUNDS = 3


def beside_toyworld(model: str) -> float:
    """Return the ratio of the medians. The two models are timed in turns, since other work slows both."""
    found: list[list[float]] = []
    models: list[Models] = []
    for name in (model, "toyworld"):
        world = read_toyworld(SHIPPED[name])
        models.append(Models(world.transformer, world.text, ToyDecoder(world.vae, world.config)))
        found.append([])
    for _ in range(ROUNDS):
        for times, each in zip(found, models, strict=True):
            times += seconds_per_chunk(each, time.process_time)
    return statistics.median(found[0]) / statistics.median(found[1])
