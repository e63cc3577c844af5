"""A short run at start: warms caches and compilers, and measures a chunk's time by number of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import ChunkReady, Control, Event, SessionFailed, SessionSpec
from turboserve.worker.engine.session import Session

PROMPTS = ("a red circle moving left on black", "a blue square on white")
BATCHES = (1, 2, 4)
ROUNDS = 2
"""Chunks of each session. The fastest round counts: noise and cold caches only add time."""
MOST_SWITCHES = 24
WAIT_S = 1.0


class WarmUpError(RuntimeError):
    """The engine cannot generate a chunk. Do not retry."""


def measure(engine: Engine) -> dict[int, float]:
    """L(b): seconds in which b sessions together get one chunk each. The engine must hold no session.

    All forwards of a chunk count, also the last one, over its clean latents.

    On a CPU these are processor seconds, not wall-clock seconds: workers start together, and a time measured
    while all others warm up does not hold later. The processor time of all threads counts, including that of
    stream executors.
    """
    clock = time.process_time if engine.device.type == "cpu" else time.monotonic
    seconds: dict[int, float] = {}
    for batch in BATCHES:
        if batch > engine.free_slabs:
            break
        seconds[batch] = _measure(engine, batch, clock)
    return seconds


def sessions_in_real_time(seconds: dict[int, float], chunk_s: float, margin: float, limit: int) -> int:
    """Largest number of sessions, at least 1, whose chunks take at most `margin` of their playing time.

    `seconds`: see `quality.beyond_slabs`.
    """
    profile = LatencyProfile(seconds)
    count = 1
    while count < limit and profile(count + 1) <= margin * chunk_s:
        count += 1
    return count


def switch_prompts(engine: Engine) -> None:
    """Change one session's prompt after every chunk, until its window is full and evicts frames.

    Every length of a recache is thus computed once before a viewer waits for one. Of a window longer than
    `MOST_SWITCHES` chunks, only the shorter lengths are computed. The engine must hold no session. Raises
    `WarmUpError`.
    """
    config = engine.config
    last = -(-config.window_frames // config.frames_per_chunk)
    if config.session_frames is not None:
        last = min(last, config.session_frames // config.frames_per_chunk - 1)
    last = min(last, MOST_SWITCHES)
    with _admitted(engine, 1, last + 1) as [name]:
        session, asked, made = engine.sessions[name], 0, 0
        while made <= last:
            for event in _step(engine):
                made += isinstance(event, ChunkReady)
            # The control comes while a chunk is in progress, so that its recache comes next.
            if session.chunk is not None and session.chunk.index == asked < last:
                asked += 1
                engine.control(name, Control(asked, prompt=PROMPTS[asked % 2]))


def _measure(engine: Engine, batch: int, clock: Callable[[], float]) -> float:
    rounds: list[float] = []
    made = 0
    with _admitted(engine, batch, ROUNDS) as names:
        sessions, started = [engine.sessions[name] for name in names], clock()
        while len(rounds) < ROUNDS:
            made += sum(isinstance(event, ChunkReady) for event in _step(engine))
            chunks = len(rounds) + 1
            # A chunk may be ready before its last forward, which counts, too.
            if made >= chunks * batch and all(_computed(session) >= chunks for session in sessions):
                now = clock()
                rounds.append(now - started)
                started = now
    return min(rounds)


def _computed(session: Session) -> int:
    """Number of chunks all of whose forwards are computed."""
    return session.state.next_chunk + (session.chunk is not None and not session.forwarding)


def _step(engine: Engine) -> Sequence[Event]:
    events = engine.step(time.monotonic())
    for event in events:
        if isinstance(event, SessionFailed):
            raise WarmUpError(f"the engine cannot generate a chunk: {event.error}")
    if not engine.has_work(time.monotonic()):
        engine.wait(WAIT_S)
    return events


@contextmanager
def _admitted(engine: Engine, count: int, chunks: int) -> Iterator[list[str]]:
    """Admit `count` sessions whose lead does not limit them for `chunks` chunks; evict them afterwards."""
    names = [f"warm-up-{number}" for number in range(count)]
    playhead_s = engine.config.media_start(chunks + 1)
    for name in names:
        engine.admit(SessionSpec(name, PROMPTS[0], playhead_s=playhead_s, pinned=True), time.monotonic())
    try:
        yield names
    finally:
        for name in names:
            if name in engine.sessions:
                engine.evict(name)
