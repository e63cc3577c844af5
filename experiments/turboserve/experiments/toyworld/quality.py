"""Measures how well toyworld follows prompts that it never saw, through the worker's engine.

Every prompt is a session: three chunks, then a switch to another held-out prompt, then three more. The judge
examines the decoder's pixels. As a baseline, the same clips are judged against other sessions' prompts: a
model that ignores its prompt would get that score.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turboserve.experiments.toyworld import steering
from turboserve.experiments.toyworld.judge import Verdict, has_colours, judge
from turboserve.experiments.toyworld.prompts import phrase
from turboserve.experiments.toyworld.world import Scene, random_scene
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity import AttentionName, Fidelity
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
from turboserve.worker.model.presets import SHIPPED, UnknownPresetError
from turboserve.worker.model.toyworld import ToyDecoder, ToyWorld, read_toyworld

FULL_PROMPTS = 200
SAMPLE_PROMPTS = 30
CHUNKS_BEFORE = 3
CHUNKS_AFTER = 3
SWITCH_CHUNKS = 2
"""A switch counts if the new colors appear in one of this many chunks from the applied chunk on."""
LONG_CHUNKS = 120
LABELS = {"colour": "color"}
"""Key of the result → its row label in the table, where they differ."""
LONG_SESSIONS = 8
FULL_STEERED, SAMPLE_STEERED = 50, 6
"""Sessions that are steered, with either size of chunks."""
CONCURRENT = 8
TIMED_CHUNKS = 16

Clip = NDArray[np.uint8]


class GenerationError(RuntimeError):
    """The engine gave up a session of the benchmark."""


@dataclass(frozen=True)
class Job:
    """One session: a scene and its prompt, and optionally the scene after CHUNKS_BEFORE chunks."""

    scene: Scene
    prompt: str
    seed: int
    after: Scene | None = None
    after_prompt: str = ""


@dataclass
class Played:
    """The chunks of one session, and the first one that shows the second prompt."""

    chunks: list[Clip] = field(default_factory=list)
    applied: int | None = None


def held_out_jobs(count: int, seed: int) -> list[Job]:
    """Draw sessions over scenes, and for half of them phrasings, that training never saw."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    while len(jobs) < count:
        first, second = (random_scene(rng, 0.5, True) for _ in range(2))
        if {f.colour for f in first.figures} & {f.colour for f in second.figures}:
            continue
        phrases = [phrase(scene, rng, rng.random() < 0.5) for scene in (first, second)]
        jobs.append(Job(first, phrases[0], rng.randrange(2**31), second, phrases[1]))
    return jobs


def generate(
    models: Models,
    jobs: Sequence[Job],
    chunks: int,
    concurrent: int = CONCURRENT,
    fidelity: Fidelity | None = None,
    attention: AttentionName = "rows",
) -> list[Played]:
    """Run the jobs through one engine, `concurrent` sessions at a time, `chunks` chunks each.

    `fidelity`: the configuration of all chunks. None: the best. Raises AttentionUnavailableError.
    """
    config = models.transformer.config
    slab = SlabLayout.of(config, models.transformer.patch_embedding.weight.dtype).total_bytes
    options = EngineOptions(slab_bytes=concurrent * slab, max_lead_s=float("inf"), attention=attention)
    engine = Engine(models, options)
    played = [Played() for _ in jobs]
    waiting = list(range(len(jobs)))
    running = 0
    while waiting or running:
        while waiting and running < concurrent:
            row = waiting.pop(0)
            spec = SessionSpec(str(row), jobs[row].prompt, jobs[row].seed, fidelity=fidelity)
            engine.admit(spec, time.monotonic())
            running += 1
        for event in engine.step(time.monotonic()):
            if isinstance(event, SessionFailed):
                raise GenerationError(f"session {event.session}: {event.error}")
            if isinstance(event, ControlApplied):
                played[int(event.session)].applied = event.chunk
            if not isinstance(event, ChunkReady):
                continue
            row = int(event.session)
            played[row].chunks.append(event.frames.numpy())
            if len(played[row].chunks) == chunks:
                engine.evict(event.session)
                running -= 1
            elif len(played[row].chunks) == CHUNKS_BEFORE and jobs[row].after is not None:
                engine.control(event.session, Control(1, prompt=jobs[row].after_prompt))
    return played


def seconds_per_chunk(models: Models, clock: Callable[[], float]) -> list[float]:
    """Return the seconds of each chunk of a lone session, with all its stages, on one CPU thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = models.transformer.config
        slab = SlabLayout.of(config, models.transformer.patch_embedding.weight.dtype).total_bytes
        engine = Engine(models, EngineOptions(slab_bytes=slab, max_lead_s=float("inf")), clock)
        engine.admit(SessionSpec("timed", "a red circle moving left", 0), clock())
        found: list[float] = []
        while len(found) < TIMED_CHUNKS:
            for event in engine.step(clock()):
                if isinstance(event, ChunkReady):
                    found.append(event.timings.ready_s - event.timings.started_s)
        return found[TIMED_CHUNKS // 4 :]
    finally:
        torch.set_num_threads(threads)


def run(full: bool, seed: int = 0, model: str = "toyworld", world: ToyWorld | None = None) -> dict[str, Any]:
    """Run the benchmark: accuracies in 0..1, seconds, counts. Takes under a minute unless `full`.

    `model`: a model that ships; `world`: its networks, if they are read already. Raises `UnknownPresetError`
    and `UnreadableCheckpointError`.
    """
    if model not in SHIPPED:
        raise UnknownPresetError(model, SHIPPED)
    weights = SHIPPED[model]
    world = world or read_toyworld(weights)
    models = Models(world.transformer, world.text, ToyDecoder(world.vae, world.config))
    begun = time.monotonic()
    jobs = held_out_jobs(FULL_PROMPTS if full else SAMPLE_PROMPTS, seed)
    played = generate(models, jobs, CHUNKS_BEFORE + CHUNKS_AFTER)
    before = [judge(np.concatenate(p.chunks[1:CHUNKS_BEFORE])) for p in played]
    after = [judge(np.concatenate(p.chunks[CHUNKS_BEFORE + 1 :])) for p in played]
    switched = [_switched(job, p) for job, p in zip(jobs, played, strict=True)]
    scenes = [job.scene for job in jobs]
    others = scenes[1:] + scenes[:1]
    later = [job.after for job in jobs if job.after is not None]
    wall, cpu = (seconds_per_chunk(models, clock) for clock in (time.monotonic, time.process_time))
    result: dict[str, Any] = {
        "benchmark": "toyworld",
        "model": model,
        "full": full,
        "seed": seed,
        "n_prompts": len(jobs),
        **_accuracies(before, scenes),
        "switch_accuracy": _mean(switched),
        "after_switch": _accuracies(after, later),
        "baseline_other_prompts": _accuracies(before, others),
        "one_figure": _accuracies(*_only(before, scenes, 1)),
        "two_figures": _accuracies(*_only(before, scenes, 2)),
        "chunk_seconds_p50": statistics.median(wall),
        "chunk_seconds_max": max(wall),
        "chunk_cpu_seconds_p50": statistics.median(cpu),
        "parameters": world.parameters,
        "weights_bytes": weights.stat().st_size,
        "failures": _failures(jobs, before, after, switched),
    }
    steered = FULL_STEERED if full else SAMPLE_STEERED
    result["steering"] = steering.measure(world, steered, seed, live=False)
    result["steering_live"] = steering.measure(world, steered, seed, live=True)
    if full:
        result["long"] = long_sessions(models, seed)
    result["wall_seconds"] = time.monotonic() - begun
    return result


def long_sessions(models: Models, seed: int) -> dict[str, Any]:
    """Check whether sessions still show their prompts after LONG_CHUNKS chunks.

    Accuracies are over the last two chunks.
    """
    jobs = [Job(job.scene, job.prompt, job.seed) for job in held_out_jobs(LONG_SESSIONS, seed + 1)]
    played = generate(models, jobs, LONG_CHUNKS)
    verdicts = [judge(np.concatenate(p.chunks[-2:])) for p in played]
    return {
        "sessions": len(jobs),
        "chunks": LONG_CHUNKS,
        **_accuracies(verdicts, [job.scene for job in jobs]),
    }


def table(result: dict[str, Any]) -> str:
    """Format the result."""
    rows: list[tuple[str, ...]] = [
        ("", "all", "one figure", "two figures", "after switch", "other prompts (baseline)")
    ]
    parts = [
        result,
        *(result[k] for k in ("one_figure", "two_figures", "after_switch", "baseline_other_prompts")),
    ]
    for name in ("colour", "motion", "shape", "background"):
        rows.append((LABELS.get(name, name), *(f"{part[name + '_accuracy']:.3f}" for part in parts)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.append(f"switch within {SWITCH_CHUNKS} chunks: {result['switch_accuracy']:.3f}")
    for name, chunks in (("steering", "three latent frames"), ("steering_live", "one latent frame")):
        found = result[name]
        lines.append(
            f"steered within two chunks of {chunks}: direction {found['direction_accuracy']:.3f}, "
            f"shape {found['shape_accuracy']:.3f} ({found['draws']} draws)"
        )
    if "long" in result:
        long = result["long"]
        lines.append(
            f"after {long['chunks']} chunks ({long['sessions']} sessions): "
            f"color {long['colour_accuracy']:.3f}, "
            f"motion {long['motion_accuracy']:.3f}, shape {long['shape_accuracy']:.3f}"
        )
    lines.append(
        f"{result['n_prompts']} held-out prompts; "
        f"{result['chunk_seconds_p50'] * 1000:.0f} ms per chunk on one core "
        f"({result['chunk_cpu_seconds_p50'] * 1000:.0f} ms of processor time); "
        f"{result['parameters'] / 1e6:.2f} M parameters in {result['weights_bytes'] / 1e6:.1f} MB"
    )
    return "\n".join(lines)


def _switched(job: Job, played: Played) -> bool:
    if played.applied is None or job.after is None:
        return False
    colours = [figure.colour for figure in job.after.figures]
    shown = played.chunks[played.applied : played.applied + SWITCH_CHUNKS]
    return any(has_colours(chunk, colours) for chunk in shown)


def _accuracies(verdicts: Sequence[Verdict], scenes: Sequence[Scene]) -> dict[str, float]:
    pairs = list(zip(verdicts, scenes, strict=True))
    return {
        "colour_accuracy": _mean([v.colours_match(s) for v, s in pairs]),
        "motion_accuracy": _mean([v.motions_match(s) for v, s in pairs]),
        "shape_accuracy": _mean([v.shapes_match(s) for v, s in pairs]),
        "background_accuracy": _mean([v.background == s.background for v, s in pairs]),
    }


def _only(
    verdicts: Sequence[Verdict], scenes: Sequence[Scene], figures: int
) -> tuple[list[Verdict], list[Scene]]:
    rows = [i for i, scene in enumerate(scenes) if len(scene.figures) == figures]
    return [verdicts[i] for i in rows], [scenes[i] for i in rows]


def _failures(
    jobs: Sequence[Job], before: Sequence[Verdict], after: Sequence[Verdict], switched: Sequence[bool]
) -> list[dict[str, Any]]:
    """Return the first prompts that failed, with what was seen, for work on the model."""
    found: list[dict[str, Any]] = []
    for job, was, now, turned in zip(jobs, before, after, switched, strict=True):
        if not (was.motions_match(job.scene) and was.shapes_match(job.scene)):
            found.append({"prompt": job.prompt, "seen": [list(_words(s)) for s in was.figures]})
        if not turned:
            found.append({"switch_to": job.after_prompt, "seen": [list(_words(s)) for s in now.figures]})
    return found[:40]


def _words(seen: Any) -> tuple[str, str, str]:
    return str(seen.shape), seen.colour, str(seen.motion)


def _mean(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 0.0
