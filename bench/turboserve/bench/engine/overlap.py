"""Concurrent decoding and denoising compared with sequential, in elapsed time and in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, SessionFailed, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models

PROMPT = "a red circle moving left on black"
WAIT_S = 1.0


class OverlapError(RuntimeError):
    """A session failed while it was measured."""


@dataclass(frozen=True)
class Compared:
    """Medians over the rounds."""

    apart_s: float
    """Wall seconds for one chunk of every session, decoded in the engine's thread."""
    beside_s: float
    """Wall seconds for one chunk of every session, decoded in a stream executor of its own."""
    speedup: float
    """Median of the rounds' quotients.

    The two runs of a round follow each other, under the most similar load.
    """


def compare(models: Models, sessions: int, chunks: int, rounds: int) -> Compared:
    """Alternate between the two, `rounds` times, with `chunks` chunks of every session each."""
    found = []
    for number in range(rounds):
        # The order alternates, so that rising load on the machine favors neither.
        order = (False, True) if number % 2 == 0 else (True, False)
        seconds = {overlap: seconds_per_chunk(models, sessions, chunks, overlap) for overlap in order}
        found.append((seconds[False], seconds[True]))
    middle = len(found) // 2
    return Compared(
        sorted(apart for apart, _ in found)[middle],
        sorted(beside for _, beside in found)[middle],
        sorted(apart / beside for apart, beside in found)[middle],
    )


def seconds_per_chunk(
    models: Models, sessions: int, chunks: int, overlap: bool, decode_s: Mapping[int, float] | None = None
) -> float:
    """Return the wall seconds for a chunk of every session, after two that warm up. Raises `OverlapError`.

    `decode_s` is the decoding time by number of sessions, which determines how many are decoded at once;
    None: one.
    """
    weight = models.transformer.patch_embedding.weight
    slab = SlabLayout.of(models.transformer.config, weight.dtype).total_bytes
    options = EngineOptions(
        sessions * slab,
        max_lead_s=float("inf"),
        max_batch=sessions,
        overlap=overlap,
        host_bytes=0,
        decode_batch=max(decode_s or (1,)),
    )
    engine = Engine(models, options, profiles={"decode": decode_s or {}})
    for number in range(sessions):
        engine.admit(SessionSpec(str(number), PROMPT, seed=number), time.monotonic())
    _make(engine, 2 * sessions)
    began = time.monotonic()
    _make(engine, chunks * sessions)
    seconds = time.monotonic() - began
    for number in range(sessions):
        engine.evict(str(number))
    return seconds / chunks


@contextmanager
def one_core() -> Iterator[None]:
    """Restrict this thread, and the threads that it starts in this context, to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _make(engine: Engine, chunks: int) -> None:
    made = 0
    while made < chunks:
        for event in engine.step(time.monotonic()):
            if isinstance(event, SessionFailed):
                raise OverlapError(f"session {event.session}: {event.error}")
            made += isinstance(event, ChunkReady)
        if not engine.has_work(time.monotonic()):
            engine.wait(WAIT_S)
