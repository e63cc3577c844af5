"""Package the engine's chunks for publication, in order, on a separate thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from opentelemetry.trace import INVALID_SPAN, Span

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.fidelity import ChunkFidelity
from turboserve.static_frozen import statically_frozen
from turboserve.telemetry import tracing
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import ChunkReady, ChunkTimings
from turboserve.worker.engine.playout import Playout
from turboserve.worker.engine.streams import bytes_of
from turboserve.worker.media import EncodedChunk, FragmentEncoder
from turboserve.worker.service import events
from turboserve.worker.service.quality import LatencySample, SlackMeasured, chunk_fidelity
from turboserve.worker.service.spans import NO_ORIGIN, ChunkOrigin, chunk_span


@statically_frozen(eq=False)
class GeneratedChunk:
    """A chunk as the engine generated it, with its run. Engine's thread → packager."""

    run: int
    ready: ChunkReady
    concurrent_sessions: int
    """Sessions that the engine worked on at the time, this one included."""
    origin: ChunkOrigin = NO_ORIGIN
    playout: tuple[float, Playout] | None = None
    """What the viewer had left without the chunk, and when, monotonic seconds. None: not known."""
    sample: LatencySample | None = None
    """What the chunk's time tells of L(b). None: nothing."""
    model: str = ""
    """Class of the session, where the worker serves several."""


@statically_frozen(eq=False)
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
    timings: ChunkTimings
    packaged_at_s: float
    """When the video was packaged, monotonic seconds, as in `timings`."""
    concurrent_sessions: int
    span: Span
    playout: tuple[float, Playout] | None = None
    """See `GeneratedChunk`."""
    fidelity: ChunkFidelity | None = None
    """Configuration of the chunk. None: the best."""
    lowered: bool = False
    """See `ChunkReady.lowered`."""
    sample: LatencySample | None = None
    """See `GeneratedChunk`."""
    model: str = ""
    """See `GeneratedChunk`."""


FromEngine = GeneratedChunk | events.SessionInput | SlackMeasured
ToLoop = PackagedChunk | events.SessionInput | SlackMeasured


log = logs.get("packager")


class ChunkEncoder(Protocol):
    """Encodes frames and latents to bytes."""

    latents_dtype: str
    """As in `LatentsHeader.dtype`."""

    def encode(self, ready: ChunkReady, first_frame: int, fps: int) -> EncodedChunk:
        """Encode the chunk's video. Any exception ends the session."""
        ...

    def latents(self, ready: ChunkReady) -> tuple[bytes, tuple[int, ...]]:
        """The chunk's clean latents as they lie in memory, and their shape."""
        ...


class TensorEncoder:
    """Encodes tensors to H.264. See `ChunkEncoder`."""

    def __init__(self, encoder: FragmentEncoder, dtype: torch.dtype) -> None:
        """`dtype`: type of the published latents."""
        self._encoder, self._dtype = encoder, dtype
        self.latents_dtype = str(dtype).removeprefix("torch.")

    def encode(self, ready: ChunkReady, first_frame: int, fps: int) -> EncodedChunk:
        """See `ChunkEncoder.encode`."""
        return self._encoder.encode(ready.frames.numpy(), index=ready.index, first_frame=first_frame, fps=fps)

    def latents(self, ready: ChunkReady) -> tuple[bytes, tuple[int, ...]]:
        """See `ChunkEncoder.latents`."""
        return bytes_of(ready.latents.to(self._dtype)), tuple(ready.latents.shape)


class ChunkPackager:
    """Converts one item. Keeps no state between calls but the latency profile."""

    def __init__(
        self,
        encoder: ChunkEncoder,
        fps: int,
        clock: Clock,
        profile: LatencyProfile,
        ladder: FidelityLadder,
    ) -> None:
        """`profile`: the engine's profile of the packaging stage, refined with every chunk. `ladder`: the
        engine's configurations."""
        self._encoder, self._fps, self._clock, self._profile = encoder, fps, clock, profile
        self._ladder = ladder

    def convert(self, item: FromEngine) -> ToLoop:
        """Package a chunk; return the failure of its run if that fails. Any other item passes unchanged."""
        if not isinstance(item, GeneratedChunk):
            return item
        try:
            return self._package(item)
        except Exception as error:
            log.exception("packaging failed", session=item.ready.session, chunk=item.ready.index)
            return events.RunFailed(item.ready.session, item.run, f"packaging: {error}")

    def _span(self, made: GeneratedChunk, began: float, now: float) -> Span:
        try:
            return chunk_span(made.ready, made.origin, began, now, self._nanoseconds)
        except Exception:
            # A fault of tracing must not end a session.
            log.exception("chunk not traced", session=made.ready.session, chunk=made.ready.index)
            return INVALID_SPAN

    def _package(self, made: GeneratedChunk) -> PackagedChunk:
        ready = made.ready
        first_frame = round(ready.media_start_s * self._fps)
        began = self._clock.monotonic()
        packaged = self._encoder.encode(ready, first_frame, self._fps)
        self._profile.observe(1, self._clock.monotonic() - began)
        now = self._clock.monotonic()
        compute_s = now - ready.timings.started_s
        span = self._span(made, began, now) if tracing() else INVALID_SPAN
        latents, shape = self._encoder.latents(ready)
        # By position, which takes a third of the time, in the order of the class.
        return PackagedChunk(
            ready.session,
            made.run,
            ready.index,
            ready.control_seq,
            first_frame,
            self._fps,
            packaged,
            latents,
            self._encoder.latents_dtype,
            shape,
            compute_s,
            ready.timings,
            now,
            made.concurrent_sessions,
            span,
            made.playout,
            chunk_fidelity(ready.fidelity, self._ladder),
            ready.lowered,
            made.sample,
            made.model,
        )

    def _nanoseconds(self, at_s: float) -> int:
        """Convert a time of the monotonic clock to Unix time, ns."""
        return round((self._clock.wall() - (self._clock.monotonic() - at_s)) * 1e9)


class ItemConverter(Protocol):
    """Converts what the engine delivers (`ChunkPackager`, `ClassPackager`)."""

    def convert(self, item: FromEngine) -> ToLoop: ...


class ClassPackager:
    """Packages the chunks of a worker that serves several classes."""

    def __init__(self, packagers: Mapping[str, ChunkPackager]) -> None:
        """`packagers`: by class, at least one."""
        self._packagers = packagers

    def convert(self, item: FromEngine) -> ToLoop:
        """See `ChunkPackager.convert`."""
        return self._packagers[item.model].convert(item) if isinstance(item, GeneratedChunk) else item


class QueuedPackager:
    """Packages on a thread. See `ports.Packager`.

    Every item of the engine passes through the queue, so that items arrive in their order. Meanwhile the
    engine generates the next chunk.
    """

    def __init__(self, packager: ItemConverter, deliver: Callable[[ToLoop], None], limit: int) -> None:
        """`deliver` is called on this thread. `limit`: largest number of waiting items."""
        self._packager, self._deliver = packager, deliver
        self._queue: queue.Queue[FromEngine | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._main, name="packager", daemon=True)

    def start(self) -> None:
        """See `ports.Packager.start`."""
        self._thread.start()

    def put(self, item: FromEngine) -> None:
        """Queue an item. Called on the engine's thread, which waits here if it is faster than the encoder."""
        self._queue.put(item)

    @property
    def alive(self) -> bool:
        """See `ports.Packager.alive`."""
        return self._thread.is_alive()

    async def end(self, timeout_s: float) -> None:
        """See `ports.Packager.end`."""
        await asyncio.to_thread(self.stop, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End after all queued items, and wait for that at most `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            self._deliver(self._packager.convert(item))
