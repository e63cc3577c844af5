"""Metrics of a worker and of its transfers."""

from __future__ import annotations

from turboserve.instruments import Instruments
from turboserve.telemetry_names import (
    BATCH_SIZE,
    ERROR_TYPE,
    LOAN_ROLE,
    START_PART,
    TAKEOVER,
    TIER,
    TRANSFER_BACKEND,
    TRANSFER_ROLE,
)

_COMPUTE_S = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_APPEND_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

_worker = Instruments("worker")

chunks = _worker.counter("turboserve.worker.chunks", "{chunk}", "Chunks accepted into the log.")
compute_duration = _worker.histogram(
    "turboserve.worker.compute.duration",
    "s",
    "First denoising step of a chunk to its packaging.",
    buckets=_COMPUTE_S,
)
batch_sessions = _worker.histogram(
    "turboserve.worker.batch.sessions",
    "{session}",
    "Sessions that the worker computed at once, as of each chunk.",
    buckets=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
)
chunk_latency = _worker.observed_gauge(
    "turboserve.worker.chunk_latency",
    "s",
    "L(b): the time of one chunk when b sessions are computed at once, at the best fidelity, as placement "
    "uses it. Measured at the start, then updated from chunks.",
    BATCH_SIZE,
)
quality = _worker.gauge(
    "turboserve.worker.quality", "1", "Mean quality of the chunks of the last minute; 1: the best."
)
quality_debt = _worker.gauge(
    "turboserve.worker.quality_debt", "1", "Share of the chunks of the last minute that the load has lowered."
)
deficit = _worker.gauge(
    "turboserve.worker.deficit",
    "{chunk}",
    "Chunks that are expected to be late even at their lowest fidelity.",
)
publish_duration = _worker.histogram(
    "turboserve.worker.publish.duration",
    "s",
    "Append of a chunk to its acknowledgement.",
    buckets=_APPEND_S,
)
publish_retries = _worker.counter(
    "turboserve.worker.publish.retries", "{append}", "Appends whose outcome was not known."
)
fenced = _worker.counter("turboserve.worker.fenced", "{chunk}", "Chunks that the broker refused.")
foreign_chunks = _worker.counter(
    "turboserve.worker.foreign_chunks",
    "{chunk}",
    "Entries of chunk logs that no owner wrote, met when a session's log was read.",
)
takeovers = _worker.counter(
    "turboserve.worker.takeovers",
    "{session}",
    "Sessions taken over from another worker, by the state that was left.",
    TAKEOVER,
)
stale_latents = _worker.counter(
    "turboserve.worker.stale_latents",
    "{latent}",
    "Stored latents that do not belong to the chunk in the log.",
)
loans = _worker.counter(
    "turboserve.worker.loans.begun", "{loan}", "Loans of another worker of the host that began."
)
loans_broken = _worker.counter(
    "turboserve.worker.loans.broken", "{loan}", "Loans whose other worker did not take part in a forward."
)
loan = _worker.gauge(
    "turboserve.worker.loans.active", "{loan}", "Loans under way, by the part of this worker.", LOAN_ROLE
)
decode_workers = _worker.gauge(
    "turboserve.worker.decode.workers", "{worker}", "Decode workers to which the worker is connected."
)
decoded_here = _worker.counter(
    "turboserve.worker.decode.own",
    "{chunk}",
    "Chunks that a worker of the role `denoise` decoded itself, because no decode worker has.",
)
decode_duration = _worker.histogram(
    "turboserve.worker.decode.duration", "s", "Time of a chunk in a decode worker.", buckets=_COMPUTE_S
)
decode_sessions = _worker.gauge(
    "turboserve.worker.decode.sessions",
    "{session}",
    "Sessions that a decode worker carries in real time, by the newest time of a chunk.",
)
encode_duration = _worker.histogram(
    "turboserve.worker.encode.duration", "s", "Time of a prompt in a text worker.", buckets=_COMPUTE_S
)
encoded_here = _worker.counter(
    "turboserve.worker.encode.own",
    "{prompt}",
    "Prompts that a worker with text workers encoded itself, because no text worker has.",
)
decoder_caches_rebuilt = _worker.counter(
    "turboserve.worker.decode.rebuilt",
    "{cache}",
    "Decoders' caches that a decode worker has rebuilt from latents.",
)
decodes_refused = _worker.counter(
    "turboserve.worker.decode.refused",
    "{chunk}",
    "Chunks for whose session a decode worker had no room.",
)
failures = _worker.counter("turboserve.worker.sessions.failed", "{session}", "Sessions that failed.")

SLACK_BUCKETS_S = (0.0, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
slack = _worker.histogram(
    "turboserve.worker.session.slack",
    "s",
    "Playout slack of a session when a chunk was published, without the chunk. 0: the chunk was late.",
    buckets=SLACK_BUCKETS_S,
)
credit = _worker.histogram(
    "turboserve.worker.session.credit",
    "s",
    "Service credit of a session when a chunk was published: its slack less the time of the next chunk. 0: "
    "it is 0 or less.",
    buckets=SLACK_BUCKETS_S,
)
lateness = _worker.histogram(
    "turboserve.worker.session.lateness",
    "s",
    "How late a chunk was published that was late: the time for which its viewer had nothing left.",
    buckets=SLACK_BUCKETS_S,
)
sessions_tier = _worker.gauge(
    "turboserve.worker.sessions.tier", "{session}", "Running sessions, by their tier.", TIER
)
sessions_resident = _worker.observed_gauge(
    "turboserve.worker.sessions.resident", "{session}", "Sessions in a slab."
)
sessions_offloaded = _worker.observed_gauge(
    "turboserve.worker.sessions.offloaded", "{session}", "Active sessions without a slab."
)
offloaded_memory = _worker.observed_gauge(
    "turboserve.worker.offloaded_memory", "By", "Host memory that offloaded sessions use, bytes."
)
residency_returns = _worker.counter(
    "turboserve.worker.residency.returns", "{session}", "Offloaded sessions that got a slab."
)
residency_late_returns = _worker.counter(
    "turboserve.worker.residency.late_returns",
    "{session}",
    "Offloaded sessions that got a slab too late for their next chunk, as predicted.",
)
capacity = _worker.observed_gauge("turboserve.worker.capacity", "{session}", "Sessions that may hold a slot.")
chunks_unpublished = _worker.observed_gauge(
    "turboserve.worker.unpublished_chunks", "{chunk}", "Chunks that are generated and not acknowledged."
)
lead = _worker.observed_gauge(
    "turboserve.worker.lead", "s", "Smallest lead of a resident session over its playhead."
)
kv = _worker.observed_gauge("turboserve.worker.kv", "By", "Slabs in use.")
host_memory = _worker.observed_gauge(
    "turboserve.worker.host_memory", "By", "Suspended sessions in host memory."
)
host_states = _worker.observed_gauge(
    "turboserve.worker.host_states",
    "{session}",
    "Suspended sessions that fit into host memory, by the largest state.",
)
start_duration = _worker.gauge(
    "turboserve.worker.start.duration", "s", "Time of the worker's start, by part.", START_PART
)
weights_received = _worker.counter(
    "turboserve.worker.weights.received", "By", "Weights fetched from other workers, bytes."
)

transfer_received = _worker.counter(
    "turboserve.worker.transfer.received", "By", "State fetched from other workers.", TRANSFER_BACKEND
)
transfer_time = _worker.counter(
    "turboserve.worker.transfer.time", "s", "Time in which state was copied.", TRANSFER_BACKEND
)
transfers_broken = _worker.counter(
    "turboserve.worker.transfers.broken",
    "{transfer}",
    "Transfers refused or broken.",
    TRANSFER_ROLE,
    ERROR_TYPE,
)
