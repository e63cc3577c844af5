"""Sessions beyond the slabs of one engine: toyworld on a CPU, in real time, with viewers that play."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from turboserve.bench.engine.models import PROMPT, toyworld
from turboserve.bench.report import BenchError
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


@dataclass
class EngineViewer:
    """Plays what is delivered, from the first chunk on."""

    delivered_s: float = 0.0
    playhead_s: float = 0.0
    stalls: int = 0
    stalled_s: float = 0.0
    stalling: bool = True

    def advance(self, seconds: float) -> None:
        """Play for `seconds`."""
        played_s = min(seconds, self.delivered_s - self.playhead_s)
        self.playhead_s += played_s
        if self.delivered_s == 0.0:
            return
        waits_s = seconds - played_s
        self.stalls += waits_s > 0.0 and not self.stalling
        self.stalling = waits_s > 0.0
        self.stalled_s += waits_s


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
    viewers = {f"s{number}": EngineViewer() for number in range(slabs + host_sessions)}
    for seed, name in enumerate(viewers):
        engine.admit(SessionSpec(name, PROMPT, seed), time.monotonic())
    _serve(engine, viewers, WARM_UP_S)
    for viewer in viewers.values():
        viewer.stalls, viewer.stalled_s = 0, 0.0
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
        "stalled_s": sum(viewer.stalled_s for viewer in viewers.values()),
        "returns": counts.returns - before,
        "return_s": (counts.return_s - waited_s) / returned if returned else None,
        "copy_out_s": limits.copy_out_s if host_sessions else None,
    }


def _serve(engine: Engine, viewers: dict[str, EngineViewer], seconds: float) -> None:
    """Let the engine work and the viewers play for `seconds` of real time."""
    config = engine.config
    now = time.monotonic()
    end, reported = now + seconds, now
    while now < end:
        if now - reported >= REPORT_S:
            for name, viewer in viewers.items():
                viewer.advance(now - reported)
                engine.playhead(name, viewer.playhead_s, now=now, playing=viewer.delivered_s > 0.0)
            reported = now
        if engine.has_work(now):
            for event in engine.step(now):
                if isinstance(event, SessionFailed):
                    raise BenchError(f"{event.session}: {event.error}")
                if isinstance(event, ChunkReady):
                    viewers[event.session].delivered_s = config.media_start(event.index + 1)
        else:
            due = engine.next_due(now)
            engine.wait(min(REST_S, REST_S if due is None else max(0.001, due - now)))
        now = time.monotonic()
