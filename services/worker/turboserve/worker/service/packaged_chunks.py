"""Items that pass between the engine's thread, the packager's thread and the event loop."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.trace import Span

from turboserve.worker.engine.interface import ChunkReady
from turboserve.worker.media import EncodedChunk
from turboserve.worker.service import events
from turboserve.worker.service.chunk_spans import NO_ORIGIN, ChunkOrigin


@dataclass(frozen=True, eq=False)
class GeneratedChunk:
    """A chunk as the engine generated it, with its run. Engine's thread → packager."""

    run: int
    ready: ChunkReady
    concurrent_sessions: int
    """Sessions that the engine worked on at the time, this one included."""
    origin: ChunkOrigin = NO_ORIGIN


@dataclass(frozen=True, eq=False)
class PackagedChunk:
    """A chunk that waits for publication. Packager → event loop, where `ChunkPackaged` announces it."""

    session: str
    run: int
    index: int
    control_seq: int
    first_frame: int
    fps: int
    packaged: EncodedChunk
    latents: bytes
    latents_dtype: str
    latents_shape: tuple[int, ...]
    compute_s: float
    """Time from the first denoising step to packaging, seconds."""
    concurrent_sessions: int
    span: Span


FromEngine = GeneratedChunk | events.SessionInput
ToLoop = PackagedChunk | events.SessionInput
