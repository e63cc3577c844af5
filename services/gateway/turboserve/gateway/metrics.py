"""Metrics of the gateway. Durations are in seconds, sizes in bytes."""

from __future__ import annotations

from typing import Protocol

from turboserve.telemetry import Gauge, meter

_meter = meter("gateway")
_LATENCY = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
_WAIT = [0.1, 0.2, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30]

sessions_created = _meter.create_counter(
    "turboserve_gateway_sessions_created", description="Sessions created by this gateway."
)
viewers = _meter.create_up_down_counter("turboserve_gateway_viewers", description="Open video streams.")
chunks = _meter.create_counter(
    "turboserve_gateway_chunks_delivered", description="Chunks sent, counted per viewer."
)
video_bytes = _meter.create_counter("turboserve_gateway_video_bytes", description="Video sent, bytes.")
stalls = _meter.create_counter(
    "turboserve_gateway_stalls", description="Times a viewer ran out of video while it should play."
)
stall_seconds = _meter.create_histogram(
    "turboserve_gateway_stall_seconds",
    description="Length of a stall.",
    explicit_bucket_boundaries_advisory=_WAIT,
)
delivery_seconds = _meter.create_histogram(
    "turboserve_gateway_delivery_seconds",
    description="From the worker's publication of a chunk to the end of its sending (wall clocks).",
    explicit_bucket_boundaries_advisory=_LATENCY,
)
ttfc_seconds = _meter.create_histogram(
    "turboserve_gateway_ttfc_seconds",
    description="From the request for a session to its first chunk sent to a viewer.",
    explicit_bucket_boundaries_advisory=_WAIT,
)
gaps = _meter.create_counter(
    "turboserve_gateway_gaps", description="Times a viewer needed a chunk that the log no longer keeps."
)

foreign_chunks = _meter.create_counter(
    "turboserve_gateway_foreign_chunks",
    description="Entries of chunk logs that were ignored, by reason: no owner wrote it, or out of order.",
)
keys_refused = _meter.create_counter(
    "turboserve_gateway_keys_refused",
    description="Requests without a known API key, by reason: missing, unknown, throttled.",
)
foreign_requests = _meter.create_counter(
    "turboserve_gateway_foreign_requests",
    description="Requests refused by their Host or Origin header, by header: host, origin.",
)
connections_refused = _meter.create_counter(
    "turboserve_gateway_connections_refused",
    description="Connections that were not admitted, by reason: `total` or `address`.",
)
connections_cut = _meter.create_counter(
    "turboserve_gateway_connections_cut",
    description="Connections that were ended because the client was too slow, by reason.",
)


class HasSlack(Protocol):
    """A timeline of the sessions that are watched at this gateway."""

    def smallest_slack(self) -> float | None:
        """Return the smallest playout slack of all sessions, in seconds; None if no session is watched."""


slack_min: Gauge[HasSlack] = Gauge(
    _meter,
    "turboserve_gateway_slack_min_seconds",
    lambda timeline: timeline.smallest_slack(),
    description="Smallest playout slack of all sessions watched through this gateway.",
)
