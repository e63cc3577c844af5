"""Measures latency and quality of every configuration of a model (`turboserve profile fidelity`).

Source: SlackServe, 4.2 and Appendix B. Quality is the mean over prompts of a judge's score in 0 to 1.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from turboserve.experiments.toyworld.judge import Verdict, judge
from turboserve.experiments.toyworld.quality import Job, generate, held_out_jobs
from turboserve.experiments.toyworld.world import Scene
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity import AttentionName, Fidelity, most_chunks
from turboserve.worker.engine.fidelity_profile import FidelityProfile, MeasuredFidelity
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, SessionFailed, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.model.config import ModelConfig

SPARSITIES = (0.0, 0.6, 0.8)
ROUNDS = 3
"""Number of times that each configuration is timed; other configurations are timed in between."""
TIMED_CHUNKS = 4
"""Number of chunks with a full window that one round times."""
JUDGED_FRAMES = 15
"""Latent frames of one prompt, in whole chunks. The judge sees all chunks but the first, which has fewer
frames."""
_Z95 = 1.96


class UnmeasurableError(Exception):
    """The configurations cannot be measured. The message names the field and the reason."""


def configurations(
    config: ModelConfig,
    steps: Sequence[int] = (),
    sparsities: Sequence[float] = SPARSITIES,
    fast_decoder: bool = False,
) -> list[Fidelity]:
    """Return the grid of configurations: every number of steps, up to three windows, every sparsity, and with
    `fast_decoder` each of them with both decoders.

    Raises InvalidFidelityError.
    """
    most = most_chunks(config)
    windows = sorted({1, (most + 1) // 2, most})
    return [
        Fidelity(count, window, sparsity, fast).check(config)
        for count in steps or range(1, len(config.denoising_steps) + 1)
        for window in windows
        for sparsity in sparsities
        for fast in ((False, True) if fast_decoder else (False,))
    ]


def profile(
    models: Models,
    grid: Sequence[Fidelity],
    quality: Callable[[Fidelity], tuple[float, tuple[float, float]]],
    prompts: int,
    say: Callable[[str], None] = lambda line: None,
    attention: AttentionName = "rows",
) -> FidelityProfile:
    """Measure every configuration of the grid. `quality` returns a mean and its 95 % interval.

    Raises InvalidFidelityError, UnmeasurableError and AttentionUnavailableError.
    """
    config = models.transformer.config
    for each in grid:
        each.check(config)
    timed: dict[Fidelity, list[float]] = {each: [] for each in grid}
    for _ in range(ROUNDS):
        for each in grid:
            timed[each] += seconds_per_chunk(models, each, attention)
    measured = []
    for each in grid:
        mean, interval = quality(each)
        found = MeasuredFidelity(each, statistics.median(timed[each]), mean, interval)
        measured.append(found)
        say(f"{each.label}: {1000 * found.seconds:.1f} ms a chunk, quality {mean:.3f}")
    device = models.transformer.patch_embedding.weight.device.type
    return FidelityProfile(fingerprint(config), device, prompts, tuple(measured), attention)


def seconds_per_chunk(models: Models, fidelity: Fidelity, attention: AttentionName = "rows") -> list[float]:
    """Return the times from the beginning of one chunk to that of the next, of a lone session, seconds.

    They cover all forwards and the decoding, without packaging. The window is full, or as full as a session
    of the model gets. On a CPU this is processor time, which other programs change little.
    """
    config = models.transformer.config
    weight = models.transformer.patch_embedding.weight
    clock = time.process_time if weight.device.type == "cpu" else time.monotonic
    slab = SlabLayout.of(config, weight.dtype).total_bytes
    options = EngineOptions(slab_bytes=slab, max_lead_s=math.inf, attention=attention)
    engine = Engine(models, options, clock)
    chunks = math.inf if config.session_frames is None else config.session_frames // config.frames_per_chunk
    if chunks < 2:
        raise UnmeasurableError(f"model: a session of {chunks} chunk has no next chunk to measure up to")
    first = min(most_chunks(config), chunks - 2)
    last = min(first + TIMED_CHUNKS, chunks - 1)
    engine.admit(SessionSpec("timed", "a red circle moving left", 0, fidelity=fidelity), clock())
    begun: list[float] = []
    while True:
        for event in engine.step(clock()):
            if isinstance(event, SessionFailed):
                raise UnmeasurableError(f"{fidelity.label}: {event.error}")
            if isinstance(event, ChunkReady):
                if event.index >= first:
                    begun.append(event.timings.started_s)
                if event.index >= last:
                    return [after - before for before, after in pairwise(begun)]


def judged_quality(
    models: Models, prompts: int, seed: int, attention: AttentionName = "rows"
) -> Callable[[Fidelity], tuple[float, tuple[float, float]]]:
    """Return a function that measures toyworld's quality over held-out prompts, the same for each call."""
    jobs = [Job(job.scene, job.prompt, job.seed) for job in held_out_jobs(prompts, seed)]

    def measure(fidelity: Fidelity) -> tuple[float, tuple[float, float]]:
        chunks = -(-JUDGED_FRAMES // models.transformer.config.frames_per_chunk)
        played = generate(models, jobs, chunks, fidelity=fidelity, attention=attention)
        scores = [
            score(judge(np.concatenate(each.chunks[1:])), job.scene)
            for each, job in zip(played, jobs, strict=True)
        ]
        mean = statistics.fmean(scores)
        return mean, wilson_interval(mean, len(scores))

    return measure


def score(verdict: Verdict, scene: Scene) -> float:
    """Return the share of color, shape, motion and background that a clip shows as its prompt states."""
    return statistics.fmean(
        (
            verdict.colours_match(scene),
            verdict.shapes_match(scene),
            verdict.motions_match(scene),
            verdict.background == scene.background,
        )
    )


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a mean of `count` scores in 0 to 1.

    Scores between 0 and 1 vary less than those that are 0 or 1, so the interval is not too narrow.
    """
    spread = _Z95**2 / count
    center = (mean + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(mean * (1 - mean) / count + spread / (4 * count))
    return max(0.0, center - half), min(1.0, center + half)


def supplied_quality(path: Path) -> tuple[int, Mapping[Fidelity, tuple[float, tuple[float, float]]]]:
    """Read a file with the quality of configurations: the number of prompts, and quality by configuration.

    The file has the form that `turboserve profile fidelity` writes; only `prompts`, the configurations, their
    `quality` and `interval` count. Raises UnmeasurableError.
    """
    try:
        value = json.loads(path.read_text())
        return int(value["prompts"]), dict(_qualities(value["configurations"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnmeasurableError(f"--quality: {path}: {type(error).__name__}: {error}") from error


def _qualities(
    rows: Iterable[Mapping[str, Any]],
) -> Iterable[tuple[Fidelity, tuple[float, tuple[float, float]]]]:
    for row in rows:
        low, high = row["interval"]
        fast = row.get("fast_decoder", False)
        fidelity = Fidelity(row["steps"], row["window_chunks"], float(row["sparsity"]), fast)
        yield fidelity, (float(row["quality"]), (float(low), float(high)))


def profile_models(
    models: Models,
    judged: bool,
    *,
    prompts: int,
    seed: int,
    steps: Sequence[int],
    sparsities: Sequence[float],
    quality_file: Path | None,
    say: Callable[[str], None],
    attention: AttentionName,
) -> FidelityProfile:
    """Measure a model. `judged`: its videos are of toyworld's world, which the judge understands.

    Raises UnmeasurableError, InvalidFidelityError and AttentionUnavailableError.
    """
    config = models.transformer.config
    if quality_file is not None:
        prompts, known = supplied_quality(quality_file)
        return profile(models, list(known), known.__getitem__, prompts, say, attention)
    if not judged:
        raise UnmeasurableError("--quality: needed for this model, since no judge is built in for it")
    grid = configurations(config, steps, sparsities, models.fast_decoder is not None)
    quality = judged_quality(models, prompts, seed, attention)
    return profile(models, grid, quality, prompts, say, attention)
