"""What a worker measures about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from turboserve.telemetry import meter

_meter = meter("worker")

chunks = _meter.create_counter("turboserve_worker_chunks", description="Chunks accepted into the log.")
chunk_compute = _meter.create_histogram(
    "turboserve_worker_chunk_compute_seconds", unit="s", description="First denoising step to packaging."
)
publish_latency = _meter.create_histogram(
    "turboserve_worker_publish_seconds", unit="s", description="Append of a chunk to its acknowledgement."
)
publish_retries = _meter.create_counter(
    "turboserve_worker_publish_retries", description="Appends whose outcome was not known."
)
fenced = _meter.create_counter("turboserve_worker_fenced", description="Chunks that the broker refused.")
foreign_chunks = _meter.create_counter(
    "turboserve_worker_foreign_chunks",
    description="Entries of chunk logs that no owner wrote, met when a session's log was read.",
)
takeovers = _meter.create_counter(
    "turboserve_worker_takeovers", description="Sessions taken over in the middle, by what was left of them."
)
stale_latents = _meter.create_counter(
    "turboserve_worker_stale_latents", description="Kept latents that were not of the chunk in the log."
)
failures = _meter.create_counter(
    "turboserve_worker_sessions_failed", description="Sessions that could not go on."
)


def observe(name: str, description: str, read: Callable[[], float], unit: str = "") -> None:
    """A gauge that is read when it is asked for."""

    def callback(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(read())

    _meter.create_observable_gauge(
        f"turboserve_worker_{name}", callbacks=[callback], unit=unit, description=description
    )
