"""Metrics of the recorder."""

from __future__ import annotations

from turboserve.instruments import Instruments
from turboserve.telemetry_names import REASON

_instruments = Instruments("recorder")

chunks = _instruments.counter("turboserve.recorder.chunks.stored", "{chunk}", "Chunks that were stored.")
stored = _instruments.counter("turboserve.recorder.written", "By", "Bytes of video that were stored.")
chunks_missing = _instruments.counter(
    "turboserve.recorder.chunks.missing",
    "{chunk}",
    "Chunks of recorded sessions that the log dropped before they were stored.",
)
foreign_chunks = _instruments.counter(
    "turboserve.recorder.chunks.foreign",
    "{chunk}",
    "Log entries of recorded sessions that no owner wrote (`owner`), or that are out of order (`order`).",
    REASON,
)
storage_failures = _instruments.counter(
    "turboserve.recorder.storage.failures", "{request}", "Requests that object storage refused."
)
put_duration = _instruments.histogram(
    "turboserve.recorder.put.duration", "s", "Time to store one segment.", buckets=(0.01, 0.05, 0.2, 1, 5, 30)
)
chunks_behind = _instruments.observed_gauge(
    "turboserve.recorder.chunks.behind",
    "{chunk}",
    "Chunks that the log has and object storage has not, of the recording that is furthest behind.",
)
recordings_open = _instruments.observed_gauge(
    "turboserve.recorder.recordings.open", "{recording}", "Recordings that are being written."
)
