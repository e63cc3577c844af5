"""The thread that encodes chunks, so that the engine goes on with the next one meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from turboserve import logs
from turboserve.clock import Clock
from turboserve.telemetry import tracer
from turboserve.worker.engine.profile import LatencyProfile
from turboserve.worker.media import FragmentEncoder
from turboserve.worker.service import inputs as told
from turboserve.worker.service.engine_thread import bytes_of
from turboserve.worker.service.stamped import Chunk, FromEngine, Made, ToLoop

log = logs.get("packager")
_trace = tracer("worker")


class Packager:
    """Everything the engine says passes through here, so that it arrives in the order it happened in."""

    def __init__(
        self,
        encoder: FragmentEncoder,
        fps: int,
        latents_dtype: torch.dtype,
        deliver: Callable[[ToLoop], None],
        clock: Clock,
        profile: LatencyProfile,
        limit: int,
    ) -> None:
        """`profile`: the engine's of this stage, refined with every chunk. `limit`: what waits at most."""
        self._encoder, self._fps, self._dtype = encoder, fps, latents_dtype
        self._deliver, self._clock, self._profile = deliver, clock, profile
        self._queue: queue.Queue[FromEngine | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._main, name="packager", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: FromEngine) -> None:
        """Called on the engine's thread, which waits here if it makes chunks faster than they are encoded."""
        self._queue.put(item)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """End after what was put so far."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            if not isinstance(item, Made):
                self._deliver(item)
                continue
            try:
                self._deliver(self._package(item))
            except Exception as error:
                log.exception("packaging failed", session=item.ready.session, chunk=item.ready.index)
                self._deliver(told.RunFailed(item.ready.session, item.run, f"packaging: {error}"))

    def _package(self, made: Made) -> Chunk:
        ready = made.ready
        first_frame = round(ready.media_start_s * self._fps)
        began = self._clock.monotonic()
        packaged = self._encoder.encode(
            ready.frames.numpy(), index=ready.index, first_frame=first_frame, fps=self._fps
        )
        self._profile.observe(1, self._clock.monotonic() - began)
        compute_s = self._clock.monotonic() - ready.timings.started_s
        span = _trace.start_span(
            "chunk",
            start_time=time.time_ns() - round(compute_s * 1e9),
            attributes={
                "turboserve.session": ready.session,
                "turboserve.chunk": ready.index,
                "turboserve.control_seq": ready.control_seq,
                "turboserve.denoise_s": ready.timings.denoised_s - ready.timings.started_s,
                "turboserve.decode_s": ready.timings.ready_s - ready.timings.denoised_s,
            },
        )
        latents = ready.latents.to(self._dtype)
        return Chunk(
            session=ready.session,
            run=made.run,
            index=ready.index,
            control_seq=ready.control_seq,
            first_frame=first_frame,
            fps=self._fps,
            packaged=packaged,
            latents=bytes_of(latents),
            latents_dtype=str(self._dtype).removeprefix("torch."),
            latents_shape=tuple(latents.shape),
            compute_s=compute_s,
            abreast=made.abreast,
            span=span,
        )
