"""Generates a clip as MP4 with the worker's engine, without a stack."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    EngineOptions,
    SessionEnded,
    SessionFailed,
    SessionSpec,
)
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.media import FragmentEncoder

SESSION = "clip"


class GenerationError(Exception):
    """The engine failed or ended the session."""


def fragments(
    models: Models,
    prompts: Sequence[str],
    seconds: float,
    seed: int,
    starts: Sequence[float] | None = None,
    on_frames: Callable[[int, int], object] = lambda done, total: None,
) -> Iterator[bytes]:
    """Generate a clip and yield the parts of its MP4 file: the init segment, then one fragment per chunk.

    The clip has `seconds` of video, to the nearest frame, and at least one chunk for each prompt. `on_frames`
    is called with the numbers of finished and of all frames.

    The fragments are closed. Each prompt applies from its second in `starts` on. `starts` rises from 0.
    Without `starts`, all prompts last equally long, up to a chunk. A switch takes effect at the start of a
    chunk, as in a live session. Raises GenerationError.
    """
    config = models.transformer.config
    total = chunks_for(seconds, config.media_start)
    frames = max(1, round(seconds * config.fps))
    if starts is None and len(prompts) > total:
        total = len(prompts)
        frames = round(config.media_start(total) * config.fps)
    slab = SlabLayout.of(config, models.transformer.patch_embedding.weight.dtype).total_bytes
    engine = Engine(models, EngineOptions(slab_bytes=slab, max_lead_s=float("inf"), max_batch=1))
    engine.admit(SessionSpec(SESSION, prompts[0], seed), time.monotonic())
    encoder = FragmentEncoder()
    made = shown = 0
    while made < total:
        for event in engine.step(time.monotonic()):
            if isinstance(event, SessionFailed | SessionEnded):
                raise GenerationError(event.error if isinstance(event, SessionFailed) else event.reason)
            if not isinstance(event, ChunkReady):
                continue
            made += 1
            if starts is None:
                turn = made * len(prompts) // total
            else:
                turn = bisect.bisect_right(starts, config.media_start(made)) - 1
            if made < total and turn > shown:
                shown = turn
                engine.control(SESSION, Control(turn, prompt=prompts[turn]))
            first_frame = round(event.media_start_s * config.fps)
            packaged = encoder.encode(
                event.frames.numpy()[: frames - first_frame],
                index=event.index,
                first_frame=first_frame,
                fps=config.fps,
            )
            if event.index == 0:
                yield packaged.init
            yield packaged.fragment
            on_frames(min(frames, first_frame + packaged.frames), frames)


def chunks_for(seconds: float, media_start: Callable[[int], float]) -> int:
    """Return how many chunks cover `seconds`, at least one. `media_start` returns the start of a chunk."""
    chunks = 1
    while media_start(chunks) < seconds:
        chunks += 1
    return chunks
