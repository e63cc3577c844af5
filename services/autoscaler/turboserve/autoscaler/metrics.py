"""Metrics of the autoscaler. Each process has one pool."""

from __future__ import annotations

from turboserve.instruments import Instruments
from turboserve.telemetry_names import POOL, POOL_ACTION, POOL_MEMBER_PHASE

_autoscaler = Instruments("autoscaler")

leads = _autoscaler.observed_gauge(
    "turboserve.autoscaler.leads",
    "{process}",
    "1 while this process runs the pool that several autoscalers share, else 0.",
    POOL,
)
actions = _autoscaler.counter(
    "turboserve.autoscaler.actions", "{action}", "Actions of the autoscaler.", POOL_ACTION
)
members = _autoscaler.gauge(
    "turboserve.autoscaler.members", "{member}", "The pool's places for workers, by phase.", POOL_MEMBER_PHASE
)
workers_target = _autoscaler.gauge(
    "turboserve.autoscaler.workers.target", "{worker}", "Workers that the pool should have."
)
workers_maximum = _autoscaler.gauge(
    "turboserve.autoscaler.workers.maximum",
    "{worker}",
    "Workers that the pool starts by itself, at most; 0: another system starts them.",
)
gpus = _autoscaler.gauge(
    "turboserve.autoscaler.gpus",
    "{gpu}",
    "GPUs of the pool's workers, from their launch to their end. The integral over time is GPU-seconds.",
)
sessions_required = _autoscaler.gauge(
    "turboserve.autoscaler.sessions.required",
    "{session}",
    "Demand: sessions that need a slot, by the newest load feedback.",
)
sessions_capacity = _autoscaler.gauge(
    "turboserve.autoscaler.sessions.capacity",
    "{session}",
    "Supply: sessions that the ready workers may hold, by the newest load feedback.",
)
utilization_max = _autoscaler.gauge(
    "turboserve.autoscaler.utilization.max", "1", "ρ: load of the busiest worker, as a share of its capacity."
)
utilization_target = _autoscaler.gauge(
    "turboserve.autoscaler.utilization.target", "1", "ρ̂: the share for which the pool is sized."
)
volatility = _autoscaler.gauge(
    "turboserve.autoscaler.volatility", "1", "Volatility of new activations in the detector's window."
)
feedback_stale = _autoscaler.gauge(
    "turboserve.autoscaler.feedback.stale",
    "{feedback}",
    "1 while the load feedback is missing or too old, so that the pool does not shrink; else 0.",
)
decode_workers = _autoscaler.gauge(
    "turboserve.autoscaler.decode.workers",
    "{worker}",
    "Decode workers of the pool's workers, by the newest load feedback; 0: the workers decode.",
)
decode_workers_needed = _autoscaler.gauge(
    "turboserve.autoscaler.decode.needed",
    "{worker}",
    "Decode workers that the pool's sessions need. Another system starts them.",
)
