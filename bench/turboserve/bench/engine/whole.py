"""The whole engine with a decoder, by the wall clock: how many sessions play, and the time of suspensions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turboserve.bench.engine.overlap import seconds_per_chunk
from turboserve.worker.engine.budget import plan
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import (
    ChunkReady,
    EngineOptions,
    Event,
    SessionFailed,
    SessionSpec,
    Suspended,
    SuspendRefused,
)
from turboserve.worker.engine.models import Models

WAIT_S = 1.0
LIMIT_S = 300.0


class PipelineError(RuntimeError):
    """A session failed, was refused, or took too long while it was measured."""


def playing(
    models: Models, sizes: Sequence[int], chunks: int, decode_s: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Measure the seconds in which all sessions get one decoded chunk, by number of sessions.

    Also returns the largest number of sessions that get theirs within its playing time. For `decode_s`, see
    `seconds_per_chunk`; the result is compared with decoding one session at a time.
    """
    config = models.transformer.config
    limit_s = config.frames_per_chunk * config.frames_per_latent / config.fps
    seconds: dict[int, float] = {}
    apart: dict[int, float] = {}
    one_by_one: dict[int, float] = {}
    refused: dict[str, str] = {}
    for size in sizes:
        try:
            seconds[size] = seconds_per_chunk(models, size, chunks, overlap=True, decode_s=decode_s)
            apart[size] = seconds_per_chunk(models, size, chunks, overlap=False, decode_s=decode_s)
            if decode_s and size > 1:
                one_by_one[size] = seconds_per_chunk(models, size, chunks, overlap=True)
        except torch.OutOfMemoryError as error:
            refused[str(size)] = str(error).splitlines()[0]
    return {
        "chunk_of_each_s": {str(size): value for size, value in seconds.items()},
        "chunk_of_each_without_overlap_s": {str(size): value for size, value in apart.items()},
        "chunk_of_each_decoded_one_by_one_s": {str(size): value for size, value in one_by_one.items()},
        "overlap_speedup": {str(size): apart[size] / seconds[size] for size in apart},
        "out_of_memory": refused,
        "sessions_at_full_speed": max((n for n, s in seconds.items() if s <= limit_s), default=0),
    }


def moving(models: Models, chunks: int) -> dict[str, Any]:
    """Suspend one of two sessions to the host and resume it while the other computes.

    Seconds are wall time from the call to the event, including the wait for a boundary. Two results are
    compared bit for bit: the state before and after, and the suspended session's video with that of an engine
    that decodes in its own thread.
    """
    moved, video = _story(models, chunks, overlap=True)
    _, plain = _story(models, chunks, overlap=False)
    same = all(torch.equal(a, b) for a, b in zip(video, plain, strict=True))
    return moved | {"video_bit_equal": same}


def _story(models: Models, chunks: int, overlap: bool) -> tuple[dict[str, Any], list[Tensor]]:
    budget = plan(models, 1 << 62)
    state = budget.slab_bytes + budget.decode_cache_bytes + budget.state_bytes + (1 << 20)
    engine = Engine(
        models,
        EngineOptions(
            2 * budget.slab_bytes,
            2 * state,
            max_lead_s=float("inf"),
            max_batch=2,
            overlap=overlap,
        ),
    )
    video: list[Tensor] = []

    def until(kind: type[Event], session: str, count: int = 1) -> list[Event]:
        found: list[Event] = []
        deadline = time.monotonic() + LIMIT_S
        while len(found) < count:
            if time.monotonic() > deadline:
                raise PipelineError(f"no {kind.__name__} of session {session} in {LIMIT_S:g} s")
            for event in engine.step(time.monotonic()):
                if isinstance(event, SessionFailed | SuspendRefused):
                    raise PipelineError(str(event))
                if isinstance(event, ChunkReady) and event.session == "moved":
                    video.append(event.frames)
                if isinstance(event, kind) and event.session == session:
                    found.append(event)
            if not engine.has_work(time.monotonic()):
                engine.wait(WAIT_S)
        return found

    for name in ("moved", "other"):
        engine.admit(SessionSpec(name, "", seed=len(name)), time.monotonic())
    until(ChunkReady, "moved", chunks)
    began = time.monotonic()
    engine.suspend("moved")
    left = until(Suspended, "moved")[0]
    out_s = time.monotonic() - began
    assert isinstance(left, Suspended)
    before = engine.snapshot("moved").digest()
    began = time.monotonic()
    engine.resume("moved", began)
    engine.suspend("moved")
    until(Suspended, "moved")
    there_and_back_s = time.monotonic() - began
    equal = engine.snapshot("moved").digest() == before
    engine.resume("moved", time.monotonic())
    # The number of chunks by now depends on the moment; the first of them are compared.
    until(ChunkReady, "moved", 2)
    for name in ("moved", "other"):
        engine.evict(name)
    return {
        "bytes": left.host_bytes,
        "expected_bytes": budget.slab_bytes + budget.decode_cache_bytes + budget.state_bytes,
        "suspend_s": out_s,
        "resume_and_suspend_s": there_and_back_s,
        "state_bit_equal": equal,
        "host_bytes_left": engine.host_bytes_used,
    }, video[: chunks + 2]
