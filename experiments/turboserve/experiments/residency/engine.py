"""Sessions beyond the slabs of one engine: toyworld on a CPU, in real time, with viewers that play."""

from __future__ import annotations

import time
from typing import Any

from turboserve.bench.engine.models import PROMPT, toyworld
from turboserve.bench.report import BenchError
from turboserve.bench.streaming.player import Player
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, SessionFailed, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models

SLABS = 2
SESSIONS = 5
WARM_UP_S = 5.0
"""Time in which the engine measures its latencies. What happens in it does not count."""
REPORT_S = 0.1
"""Time between two reports of a playhead."""
REST_S = 0.02
"""Longest time for which an engine without work waits."""


def player() -> Player:
    """Return a player that keeps no buffer: it plays whatever has arrived."""
    return Player(start_buffer_s=0.0, resume_buffer_s=0.0)


def compare(seconds: float) -> dict[str, Any]:
    """Serve the same sessions with a slab for each, and with fewer slabs."""
    models = toyworld()
    return {
        "sessions": SESSIONS,
        "slabs": SLABS,
        "seconds": seconds,
        "resident": measure(models, SESSIONS, 0, seconds),
        "offloaded": measure(models, SLABS, SESSIONS - SLABS, seconds),
    }


def measure(models: Models, slabs: int, host_sessions: int, seconds: float) -> dict[str, Any]:
    """Serve `slabs` + `host_sessions` sessions to viewers. Raises BenchError if one of them fails."""
    layout = SlabLayout.of(models.transformer.config, models.transformer.patch_embedding.weight.dtype)
    options = EngineOptions(
        slab_bytes=slabs * layout.total_bytes, host_sessions=host_sessions, max_batch=slabs, overlap=True
    )
    engine = Engine(models, options)
    viewers = {f"s{number}": player() for number in range(slabs + host_sessions)}
    for seed, name in enumerate(viewers):
        engine.admit(SessionSpec(name, PROMPT, seed), time.monotonic())
    _serve(engine, viewers, WARM_UP_S)
    for viewer in viewers.values():
        viewer.stalls, viewer.stall_s = 0, 0.0
    before, computed = engine.residency.counts.returns, time.process_time()
    waited_s, returned = engine.residency.counts.return_s, engine.residency.counts.returned
    _serve(engine, viewers, seconds)
    counts = engine.residency.counts
    returned = counts.returned - returned
    limits = engine.residency.options
    return {
        "slab_bytes": slabs * layout.total_bytes,
        "state_bytes": engine.backend.state_host_bytes,
        "cpu_share": (time.process_time() - computed) / seconds,
        "stalls": sum(viewer.stalls for viewer in viewers.values()),
        "stalled_s": sum(viewer.stall_s for viewer in viewers.values()),
        "returns": counts.returns - before,
        "return_s": (counts.return_s - waited_s) / returned if returned else None,
        "copy_out_s": limits.copy_out_s if host_sessions else None,
    }


def _serve(engine: Engine, viewers: dict[str, Player], seconds: float) -> None:
    """Let the engine work and the viewers play for `seconds` of real time."""
    config = engine.config
    now = time.monotonic()
    end, reported = now + seconds, now
    while now < end:
        if now - reported >= REPORT_S:
            for name, viewer in viewers.items():
                viewer.tick(now)
                engine.playhead(name, viewer.position_s, now=now, playing=viewer.started)
            reported = now
        if engine.has_work(now):
            for event in engine.step(now):
                if isinstance(event, SessionFailed):
                    raise BenchError(f"{event.session}: {event.error}")
                if isinstance(event, ChunkReady):
                    ends = config.media_start(event.index), config.media_start(event.index + 1)
                    viewers[event.session].arrived(event.index, *ends, time.monotonic())
        else:
            due = engine.next_due(now)
            engine.wait(min(REST_S, REST_S if due is None else max(0.001, due - now)))
        now = time.monotonic()
