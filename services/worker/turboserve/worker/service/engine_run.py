"""One run of a session in the engine, as the engine's driver keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from turboserve.worker.engine.interface import ChunkReady
from turboserve.worker.service.engine_commands import AdmitRequest, EngineCommand
from turboserve.worker.service.spans import NO_ORIGIN, ChunkOrigin, RunTrace


@dataclass(eq=False)
class EngineRun:
    """The run's number, and what the driver does for it beside the engine."""

    run: int
    warming: AdmitRequest | None = None
    """Set while a first chunk is generated only to give a session without latents a context."""
    held_back: list[EngineCommand] = field(default_factory=list)
    """Commands that wait for the end of `warming`."""
    trace: RunTrace | None = None
    """None: the worker does not trace."""

    def assign(self, traceparent: str | None) -> None:
        """Take the trace context that the row names."""
        if self.trace is not None:
            self.trace.assign(traceparent)

    def origin(self, chunk: ChunkReady, runs: Mapping[str, EngineRun]) -> ChunkOrigin:
        """Return the trace contexts of a chunk, and of the sessions of `runs` that were batched with it."""
        if self.trace is None:
            return NO_ORIGIN
        origin = self.trace.origin(chunk.control_seq)
        if not origin.sampled:
            return origin
        names = {name for step in chunk.timings.steps for name in step.sessions if name != chunk.session}
        traces = {name: runs[name].trace for name in names if name in runs}
        batched = {name: None if one is None else one.assigned for name, one in traces.items()}
        return replace(origin, batched=batched)
