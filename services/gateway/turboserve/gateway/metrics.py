"""Metrics of the gateway."""

from __future__ import annotations

from turboserve.instruments import Instruments
from turboserve.telemetry_names import HEADER, REASON

_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WAIT_S = (0.1, 0.2, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)

_gateway = Instruments("gateway")

sessions_created = _gateway.counter(
    "turboserve.gateway.sessions.created", "{session}", "Sessions created by this gateway."
)
viewers = _gateway.up_down_counter("turboserve.gateway.viewers", "{viewer}", "Open video streams.")
chunks = _gateway.counter(
    "turboserve.gateway.chunks.delivered", "{chunk}", "Chunks sent, counted per viewer."
)
video = _gateway.counter("turboserve.gateway.video", "By", "Video sent.")
stalls = _gateway.counter(
    "turboserve.gateway.stalls", "{stall}", "Times a viewer ran out of video while it should play."
)
stall_duration = _gateway.histogram(
    "turboserve.gateway.stall.duration", "s", "Length of a stall.", buckets=_WAIT_S
)
delivery_duration = _gateway.histogram(
    "turboserve.gateway.delivery.duration",
    "s",
    "From the worker's publication of a chunk to the end of its sending (wall clocks).",
    buckets=_LATENCY_S,
)
time_to_first_chunk = _gateway.histogram(
    "turboserve.gateway.time_to_first_chunk",
    "s",
    "From the request for a session to its first chunk sent to a viewer.",
    buckets=_WAIT_S,
)
gaps = _gateway.counter(
    "turboserve.gateway.gaps", "{gap}", "Times a viewer needed a chunk that the log no longer keeps."
)
foreign_chunks = _gateway.counter(
    "turboserve.gateway.foreign_chunks",
    "{chunk}",
    "Entries of chunk logs that were ignored, by reason: without an `owner`, or out of `order`.",
    REASON,
)
keys_refused = _gateway.counter(
    "turboserve.gateway.keys.refused",
    "{request}",
    "Requests without a known API key, by reason: `missing`, `unknown`, `throttled`, `in_address`.",
    REASON,
)
foreign_requests = _gateway.counter(
    "turboserve.gateway.foreign_requests",
    "{request}",
    "Requests refused by their Host or Origin header: `host`, `origin`.",
    HEADER,
)
connections_refused = _gateway.counter(
    "turboserve.gateway.connections.refused",
    "{connection}",
    "Connections that were not admitted, by reason: `total` or `address`.",
    REASON,
)
connections_cut = _gateway.counter(
    "turboserve.gateway.connections.cut",
    "{connection}",
    "Connections that were ended because the client was too slow, by reason.",
    REASON,
)
slack_min = _gateway.observed_gauge(
    "turboserve.gateway.slack.min",
    "s",
    "Smallest playout slack of all sessions watched through this gateway.",
)
