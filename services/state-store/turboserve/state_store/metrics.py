"""Metrics of the state store."""

from __future__ import annotations

from turboserve.telemetry import meter

_meter = meter("state_store")
_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]

requests = _meter.create_counter(
    "turboserve.store.requests",
    description="Requests answered, by endpoint and outcome (ok or the error's code)",
)
request_time = _meter.create_histogram(
    "turboserve.store.request.duration",
    unit="s",
    description="Time to answer, by endpoint",
    explicit_bucket_boundaries_advisory=_SECONDS,
)
conflicts = _meter.create_counter(
    "turboserve.store.conflicts", description="Compare-and-sets that lost, by endpoint"
)
outbox_delay = _meter.create_histogram(
    "turboserve.store.outbox.delay",
    unit="s",
    description="From an event's commit to its place in the log",
    explicit_bucket_boundaries_advisory=_SECONDS,
)
outbox_backlog = _meter.create_gauge(
    "turboserve.store.outbox.backlog", description="Events not in the log yet"
)
outbox_lag = _meter.create_gauge(
    "turboserve.store.outbox.lag", unit="s", description="For how long the oldest of them has waited"
)
fence_writes = _meter.create_counter("turboserve.store.fence.writes", description="`own` messages appended")
fenced = _meter.create_counter(
    "turboserve.store.fence.refused", description="`own` messages that the broker refused: another came first"
)
migrations = _meter.create_counter("turboserve.store.migrations", description="Committed steps of migrations")
chunks = _meter.create_counter("turboserve.store.chunks", description="Chunks counted from the log")
foreign_chunks = _meter.create_counter(
    "turboserve.store.foreign_chunks", description="Entries of chunk logs that no owner wrote, not counted"
)
foreign_latents = _meter.create_counter(
    "turboserve.store.foreign_latents", description="Latents of a worker that was not the session's owner"
)
log_fill = _meter.create_gauge(
    "turboserve.store.log.fill", description="Share of a stream's `max_bytes` that is taken, by stream"
)
log_disk_free = _meter.create_gauge(
    "turboserve.store.log.disk.free", unit="By", description="Free space of the disk of the broker's store"
)
log_level = _meter.create_gauge(
    "turboserve.store.log.space", description="Room for the log: 0 enough, 1 low, 2 scarce, 3 full"
)
foreign_histories = _meter.create_counter(
    "turboserve.store.foreign_histories",
    description="Histories removed from the chunk log because their identity never owned the session",
)
log_purged = _meter.create_counter(
    "turboserve.store.log.purged", description="Finished sessions removed from the log for room"
)
log_accepts = _meter.create_gauge(
    "turboserve.store.log.accepts", description="1 while a stream takes appends, else 0, by stream"
)
