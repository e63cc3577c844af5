"""Metrics of the autoscaler."""

from __future__ import annotations

from turboserve.instruments import Instruments
from turboserve.telemetry_names import POOL_ACTION

actions = Instruments("autoscaler").counter(
    "turboserve.autoscaler.actions", "{action}", "Actions of the autoscaler.", POOL_ACTION
)
