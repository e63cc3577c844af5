"""Metrics of a worker's transfers."""

from __future__ import annotations

from turboserve.telemetry import meter

_meter = meter("worker")

bytes_copied = _meter.create_counter(
    "turboserve_worker_transfer_bytes", unit="By", description="State fetched from other workers, by backend."
)
seconds = _meter.create_counter(
    "turboserve_worker_transfer_seconds", unit="s", description="Time in which state was copied, by backend."
)
broken = _meter.create_counter(
    "turboserve_worker_transfers_broken", description="Transfers refused or broken, by role and error."
)
