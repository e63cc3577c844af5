"""When a pool is overloaded: TurboServe's condition to scale out (5.2.2)."""

from __future__ import annotations

from turboserve.autoscaler.control.budget import EPSILON
from turboserve.contracts.pool import LoadFeedback
from turboserve.wording import counted


def overload(feedback: LoadFeedback, target_utilization: float, hysteresis: float) -> str:
    """Return why more workers are needed: ρ_max > ρ̂ + δ, a session waits, or a worker is full. Empty: they
    are not."""
    if feedback.rho_max > target_utilization + hysteresis + EPSILON:
        peak = f"peak load {feedback.rho_max:.2f} is above the target"
        return f"{peak} {target_utilization:.2f} + {hysteresis:.2f}"
    if feedback.waiting > 0:
        return counted(feedback.waiting, "session waits", "sessions wait")
    return "a worker is full" if feedback.rho_max >= 1 - EPSILON else ""
