"""Faults around the scheduler's core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Faults:
    """Probabilities, per message or per second."""

    delay_s: float = 0.02
    lost_answer: float = 0.0
    lost_command: float = 0.0
    lost_load: float = 0.0
    lost_event: float = 0.0
    doubled_event: float = 0.0
    store_down: float = 0.0
    death: float = 0.0
    silence: float = 0.0
    restart: float = 0.0
    pause: float = 0.0
    refusal: float = 0.0
    drain: float = 0.0
    failed_copy: float = 0.0
    slow_copy: float = 0.0
    stale_copy: float = 0.0


NONE = Faults()
MANY = Faults(0.3, 0.1, 0.1, 0.2, 0.1, 0.2, 0.01, 0.01, 0.01, 0.01, 0.01, 0.02, 0.01, 0.1, 0.1, 0.1)
