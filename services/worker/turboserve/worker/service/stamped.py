"""What passes between the engine's thread, the packager's and the event loop."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.trace import Span

from turboserve.worker.engine.events import ChunkReady
from turboserve.worker.media import Packaged
from turboserve.worker.service import inputs as told


@dataclass(frozen=True, eq=False)
class Made:
    """A chunk as the engine made it, with the run it belongs to. Engine's thread → packager."""

    run: int
    ready: ChunkReady
    abreast: int
    """Sessions that the engine worked on at the time, this one included."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk that waits for publication. Packager → event loop, together with `ChunkPackaged`."""

    session: str
    run: int
    index: int
    control_seq: int
    first_frame: int
    fps: int
    packaged: Packaged
    latents: bytes
    latents_dtype: str
    latents_shape: tuple[int, ...]
    compute_s: float
    """From its first denoising step to its packaging."""
    abreast: int
    span: Span


FromEngine = Made | told.SessionInput
ToLoop = Chunk | told.SessionInput
