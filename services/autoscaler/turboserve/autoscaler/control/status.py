"""The controller's state as contracts, for operators."""

from __future__ import annotations

from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import Decision
from turboserve.contracts.autoscale import ScalingRecord, ScalingStatus


def scaling_status(controller: Controller, now: float, wall: float) -> ScalingStatus:
    """Build the controller's status. `now` is the core's monotonic time, `wall` the same in Unix seconds."""
    advisor, policy = controller.advisor, controller.policy
    row, hearing = advisor.row, advisor.feedback_monitor
    feedback = hearing.feedback
    return ScalingStatus(
        mode=controller.mode,
        target=controller.target,
        advice=controller.advice,
        least=policy.least,
        most=policy.most,
        override=controller.override,
        volatility=controller.detector.volatility,
        level=row.level,
        latency_weight=row.latency_weight,
        target_utilization=row.target_utilization,
        predictive=advisor.predictive,
        forecast=advisor.forecast.value if advisor.predictive else None,
        required=feedback.required if feedback is not None else None,
        rho_max=feedback.rho_max if feedback is not None else None,
        feedback_age_s=hearing.age_s(now),
        stale=hearing.is_stale(now),
        refused=dict(hearing.refused),
        activity=controller.detector.activity,
        table=controller.table.provenance,
        table_differs=_differs(controller),
        decisions=tuple(scaling_record(decision, now, wall) for decision in controller.decisions),
    )


def _differs(controller: Controller) -> tuple[str, ...]:
    """Return the table's profiling conditions that differ from this controller's."""
    found = controller.table.provenance
    here = controller.policy.dynamics
    names = [name for name, value in found.controller.items() if here.get(name, value) != value]
    if found.capacity not in (0, controller.advisor.capacity):
        names.append("capacity")
    return tuple(names)


def scaling_record(decision: Decision, now: float, wall: float) -> ScalingRecord:
    """Build the record of one decision. `now` and `wall` are those of `scaling_status`."""
    return ScalingRecord(
        at=max(wall - (now - decision.at), 0.0),
        action=decision.action.value,
        target=decision.target,
        previous=decision.previous,
        advice=decision.advice,
        reason=decision.reason,
        numbers=dict(decision.numbers),
    )
