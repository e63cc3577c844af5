"""Metrics of the state store."""

from __future__ import annotations

from turboserve.instruments import Instruments
from turboserve.telemetry_names import (
    BEHAVIOR,
    DESTINATION,
    ERROR_TYPE,
    MIGRATION_STEP,
    MODEL,
    PROMPT_OUTCOME,
    STREAM,
    TENANT,
)

_LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

_store = Instruments("state_store")

requests = _store.counter(
    "turboserve.state_store.requests",
    "{request}",
    "Requests answered, by endpoint; with the error's code if there was one.",
    DESTINATION,
    ERROR_TYPE,
)
request_duration = _store.histogram(
    "turboserve.state_store.request.duration",
    "s",
    "Time to answer, by endpoint.",
    DESTINATION,
    buckets=_LATENCY_S,
)
conflicts = _store.counter(
    "turboserve.state_store.conflicts", "{request}", "Compare-and-sets that lost, by endpoint.", DESTINATION
)
outbox_delay = _store.histogram(
    "turboserve.state_store.outbox.delay",
    "s",
    "From an event's commit to its place in the log.",
    buckets=_LATENCY_S,
)
outbox_backlog = _store.gauge(
    "turboserve.state_store.outbox.backlog", "{event}", "Events that are not in the log yet."
)
outbox_lag = _store.gauge(
    "turboserve.state_store.outbox.lag", "s", "How long the oldest event of the backlog has waited."
)
fence_writes = _store.counter("turboserve.state_store.fence.writes", "{message}", "`own` messages appended.")
fence_refused = _store.counter(
    "turboserve.state_store.fence.refused",
    "{message}",
    "`own` messages that the broker refused: another came first.",
)
migrations = _store.counter(
    "turboserve.state_store.migrations", "{migration}", "Committed steps of migrations.", MIGRATION_STEP
)
migration_duration = _store.histogram(
    "turboserve.state_store.migration.duration",
    "s",
    "From the begin of a migration to its commit or abandonment, if one instance saw both.",
    MIGRATION_STEP,
    buckets=(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)
prompts = _store.counter(
    "turboserve.state_store.prompts", "{prompt}", "Prompts that a chunk settled, by outcome.", PROMPT_OUTCOME
)
prompt_duration = _store.histogram(
    "turboserve.state_store.prompt.duration",
    "s",
    "From the acceptance of a prompt to its receipt `applied`.",
    buckets=(0.1, 0.2, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0),
)
controls = _store.counter(
    "turboserve.state_store.controls",
    "{control}",
    "Values of typed controls that a chunk settled, by outcome.",
    PROMPT_OUTCOME,
)
control_duration = _store.histogram(
    "turboserve.state_store.control.duration",
    "s",
    "From the acceptance of a control's value to its receipt `applied`.",
    buckets=(0.1, 0.2, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0),
)
chunks = _store.counter("turboserve.state_store.chunks", "{chunk}", "Chunks counted from the log.")
foreign_chunks = _store.counter(
    "turboserve.state_store.foreign_chunks",
    "{chunk}",
    "Entries of chunk logs that no owner wrote, not counted.",
)
foreign_latents = _store.counter(
    "turboserve.state_store.foreign_latents",
    "{latent}",
    "Latents of a worker that was not the session's owner.",
)
foreign_histories = _store.counter(
    "turboserve.state_store.foreign_histories",
    "{history}",
    "Histories removed from the chunk log because their identity never owned the session.",
)
log_fill = _store.gauge(
    "turboserve.state_store.log.fill", "1", "Share of a stream's `max_bytes` that is taken.", STREAM
)
log_disk_free = _store.gauge(
    "turboserve.state_store.log.disk.free", "By", "Free space of the disk of the broker's store."
)
log_space = _store.gauge(
    "turboserve.state_store.log.space", "{level}", "Room for the log: 0 enough, 1 low, 2 scarce, 3 full."
)
log_purged = _store.counter(
    "turboserve.state_store.log.purged", "{session}", "Finished sessions removed from the log for room."
)
log_accepts = _store.gauge(
    "turboserve.state_store.log.accepts", "{stream}", "1 while a stream takes appends, else 0.", STREAM
)
usage_gpu_seconds = _store.observed_gauge(
    "turboserve.state_store.usage.gpu.time",
    "s",
    "GPU-seconds of a tenant's sessions of a model since the day of UTC began, from the instance that "
    "counts the cost.",
    TENANT,
    MODEL,
)
usage_chunks = _store.observed_gauge(
    "turboserve.state_store.usage.chunks", "{chunk}", "Chunks of these sessions in that time.", TENANT, MODEL
)
usage_video_time = _store.observed_gauge(
    "turboserve.state_store.usage.video.time", "s", "Playing time of these chunks.", TENANT, MODEL
)
usage_viewer_time = _store.observed_gauge(
    "turboserve.state_store.usage.viewer.time", "s", "Time of their viewers in that time.", TENANT, MODEL
)
usage_delivered = _store.observed_gauge(
    "turboserve.state_store.usage.delivered",
    "By",
    "Video that their viewers were sent in that time.",
    TENANT,
    MODEL,
)
behavior_sessions = _store.observed_gauge(
    "turboserve.state_store.behavior.sessions",
    "{session}",
    "Live sessions of a class of behavior, as of the last time when a model was found full.",
    MODEL,
    BEHAVIOR,
)
behavior_prompts = _store.observed_gauge(
    "turboserve.state_store.behavior.prompts",
    "{prompt}",
    "Mean estimate of the prompts and controls of such a session per hour.",
    MODEL,
    BEHAVIOR,
)
behavior_active_share = _store.observed_gauge(
    "turboserve.state_store.behavior.active.share",
    "1",
    "Mean estimate of the share of its age in which such a session generates.",
    MODEL,
    BEHAVIOR,
)
behavior_remaining_stay = _store.observed_gauge(
    "turboserve.state_store.behavior.remaining.stay",
    "s",
    "Mean estimate of the time until such a session leaves its slot.",
    MODEL,
    BEHAVIOR,
)
behavior_forecast_error = _store.observed_gauge(
    "turboserve.state_store.behavior.forecast.error",
    "1",
    "Errors of departures forecast with the behavior of a model's sessions, as a part of those without it. "
    "Below 1, behavior was better.",
    MODEL,
)
webhooks_disabled = _store.counter(
    "turboserve.state_store.webhooks.disabled", "{webhook}", "Webhooks disabled because of their receivers."
)
