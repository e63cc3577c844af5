"""Measures how often toyworld's figure moves as steered, through the worker's engine.

A session plays a held-out prompt with one figure. Then it is steered three times, at intervals of two chunks.
The judge examines the pixels of the two chunks from each applied direction on, all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turboserve.experiments.toyworld import world
from turboserve.experiments.toyworld.judge import judge
from turboserve.experiments.toyworld.prompts import phrase
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    ControlApplied,
    EngineOptions,
    SessionFailed,
    SessionSpec,
)
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.model.presets import with_single_frames
from turboserve.worker.model.toy_control import STEER, SteerControl
from turboserve.worker.model.toy_steering import DIRECTIONS
from turboserve.worker.model.toyworld import ToyDecoder, ToyWorld

TURNS = 3
SECONDS_BEFORE = 2.25
"""Video before the first direction, at most as long again by chance."""
CONCURRENT = 8


class SteeringError(RuntimeError):
    """The engine gave up a session of the benchmark."""


@dataclass
class _Steered:
    scene: world.Scene
    prompt: str
    directions: list[str]
    before: int
    """Chunks before the first direction."""
    chunks: list[NDArray[np.uint8]] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)


def measure(toyworld: ToyWorld, sessions: int, seed: int, *, live: bool) -> dict[str, Any]:
    """Return how often direction and shape are right, in 0..1, of `draws` directions.

    `live`: with chunks of one latent frame instead of three.
    """
    rng = random.Random(seed)
    config = with_single_frames(toyworld.config) if live else toyworld.config
    least = round(SECONDS_BEFORE / config.chunk_media_s)
    jobs = []
    for _ in range(sessions):
        scene = world.random_scene(rng, 0.0, True)
        directions = [rng.choice(DIRECTIONS) for _ in range(TURNS)]
        prompt = phrase(scene, rng, rng.random() < 0.5)
        jobs.append(_Steered(scene, prompt, directions, rng.randrange(least, 2 * least + 1)))
    whole = toyworld.transformer.config
    toyworld.transformer.config = config
    try:
        decoder = ToyDecoder(toyworld.vae, config)
        steer = SteerControl(toyworld.text, toyworld.directions)
        _run_jobs(Models(toyworld.transformer, toyworld.text, decoder, controls=steer), jobs, seed)
    finally:
        toyworld.transformer.config = whole
    right, shaped = [], []
    for job in jobs:
        for direction, first in zip(job.directions, job.applied, strict=True):
            verdict = judge(np.concatenate(job.chunks[first : first + 2]))
            scene = world.steer(job.scene, direction)
            right.append(verdict.motions_match(scene))
            shaped.append(verdict.shapes_match(scene))
    return {
        "draws": len(right),
        "direction_accuracy": sum(right) / len(right),
        "shape_accuracy": sum(shaped) / len(shaped),
    }


def _run_jobs(models: Models, jobs: Sequence[_Steered], seed: int) -> None:
    config = models.transformer.config
    slab = SlabLayout.of(config, models.transformer.patch_embedding.weight.dtype).total_bytes
    engine = Engine(models, EngineOptions(slab_bytes=CONCURRENT * slab, max_lead_s=float("inf")))
    waiting, running = list(range(len(jobs))), 0
    while waiting or running:
        while waiting and running < CONCURRENT:
            row = waiting.pop(0)
            engine.admit(SessionSpec(str(row), jobs[row].prompt, seed + row), time.monotonic())
            running += 1
        for event in engine.step(time.monotonic()):
            if isinstance(event, SessionFailed):
                raise SteeringError(f"session {event.session}: {event.error}")
            if isinstance(event, ControlApplied):
                jobs[int(event.session)].applied.append(event.chunk)
            if not isinstance(event, ChunkReady):
                continue
            job = jobs[int(event.session)]
            job.chunks.append(event.frames.numpy())
            turn, rest = divmod(len(job.chunks) - job.before, 2)
            if turn == TURNS:
                engine.evict(event.session)
                running -= 1
            elif turn >= 0 and not rest:
                values = {STEER: job.directions[turn]}
                engine.control(event.session, Control(turn + 1, values=values))
