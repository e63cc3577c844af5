"""Metrics of the webhooks service."""

from __future__ import annotations

from turboserve.instruments import Instruments
from turboserve.telemetry_names import WEBHOOK_OUTCOME

_instruments = Instruments("webhooks")

attempts = _instruments.counter(
    "turboserve.webhooks.attempts", "{attempt}", "Attempts to deliver an event, by outcome.", WEBHOOK_OUTCOME
)
attempt_duration = _instruments.histogram(
    "turboserve.webhooks.attempt.duration",
    "s",
    "Time of an attempt, from the resolution of the name to the end of the answer.",
    WEBHOOK_OUTCOME,
    buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
delivery_delay = _instruments.histogram(
    "turboserve.webhooks.delivery.delay",
    "s",
    "From an event to the answer of a receiver that has accepted it at the first attempt.",
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60),
)
in_flight = _instruments.observed_gauge(
    "turboserve.webhooks.in_flight", "{attempt}", "Attempts that are under way."
)
