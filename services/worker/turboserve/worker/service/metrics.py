"""Metrics of a worker."""

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
    "turboserve_worker_takeovers",
    description="Sessions taken over from another worker, by the state that was left.",
)
stale_latents = _meter.create_counter(
    "turboserve_worker_stale_latents",
    description="Stored latents that do not belong to the chunk in the log.",
)
failures = _meter.create_counter("turboserve_worker_sessions_failed", description="Sessions that failed.")


GAUGES = {
    "resident_sessions": ("Sessions in a slab.", ""),
    "capacity": ("Sessions that may hold a slot.", ""),
    "unpublished_chunks": ("Chunks that are generated and not acknowledged.", ""),
    "lead_seconds": ("Smallest lead of a resident session over its playhead.", "s"),
    "kv_bytes": ("Bytes of the slabs in use.", "By"),
    "host_bytes": ("Bytes of suspended sessions in host memory.", "By"),
    "host_states": ("Suspended sessions that fit into host memory, by the largest state.", ""),
}
"""Gauges that are read when metrics are requested: name → description and unit."""


def observe(name: str, read: Callable[[], float]) -> None:
    """Export the gauge `name` of `GAUGES` from now on."""
    description, unit = GAUGES[name]

    def callback(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(read())

    _meter.create_observable_gauge(
        f"turboserve_worker_{name}", callbacks=[callback], unit=unit, description=description
    )
