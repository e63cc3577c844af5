"""A short run at start: warms caches and compilers, and measures what a chunk takes by number of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.events import ChunkReady, SessionFailed
from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.engine.spec import SessionSpec

BATCHES = (1, 2, 4)
ROUNDS = 2
"""Chunks of each session; the fastest counts, for what disturbs only ever slows down, and so does novelty."""
WAIT_S = 1.0


class WarmUpError(RuntimeError):
    """The engine cannot make a chunk. Not worth a retry."""


def measure(engine: Engine) -> dict[int, float]:
    """L(b): seconds in which b sessions together get one chunk each. The engine must hold no session.

    On a CPU these are seconds of the processor, not of the wall: workers start together, and what one of them
    measures while all the others warm up says nothing about the hours after. All threads count, so that what
    is done in lanes does.
    """
    clock = time.process_time if engine.table.device.type == "cpu" else time.monotonic
    seconds: dict[int, float] = {}
    for batch in BATCHES:
        if batch > engine.free_slots:
            break
        seconds[batch] = _measure(engine, batch, clock)
    return seconds


def sessions_in_real_time(seconds: dict[int, float], chunk_s: float, margin: float, limit: int) -> int:
    """The largest number of sessions, 1 at least, whose chunks are made in `margin` of their playing time."""
    profile = LatencyProfile(seconds)
    count = 1
    while count < limit and profile(count + 1) <= margin * chunk_s:
        count += 1
    return count


def _measure(engine: Engine, batch: int, clock: Callable[[], float]) -> float:
    names = [f"warm-up-{number}" for number in range(batch)]
    config = engine.config
    for name in names:
        # A playhead far ahead: the warm-up is not held back by the lead.
        spec = SessionSpec(
            name, "a red circle moving left on black", playhead_s=config.media_start(ROUNDS + 1)
        )
        engine.admit(spec, time.monotonic())
    rounds: list[float] = []
    made = 0
    started = clock()
    try:
        while len(rounds) < ROUNDS:
            for event in engine.step(time.monotonic()):
                if isinstance(event, SessionFailed):
                    raise WarmUpError(f"the engine cannot make a chunk: {event.error}")
                made += isinstance(event, ChunkReady)
            if not engine.has_work(time.monotonic()):
                engine.wait(WAIT_S)
            if made >= batch:
                now = clock()
                rounds.append(now - started)
                made, started = made - batch, now
    finally:
        for name in names:
            if name in engine.table.sessions:
                engine.evict(name)
    return min(rounds)
