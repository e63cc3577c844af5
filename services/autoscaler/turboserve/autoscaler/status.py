"""The pool's and the controller's status for operators."""

from __future__ import annotations

from collections.abc import Callable

from turboserve.autoscaler import metrics
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import Decision
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.pool_members import STARTING, PoolMember
from turboserve.contracts.autoscale import ScalingRecord, ScalingStatus
from turboserve.contracts.decoding import DecodeNeed
from turboserve.contracts.pool import LoadFeedback, PoolAction, PoolMemberPhase, PoolMemberStatus, PoolStatus
from turboserve.contracts.pool_history import VOLATILITY_LIMIT, PoolSample
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.served_classes import served_classes
from turboserve.telemetry_names import POOL_MEMBER_PHASE

_PHASES = {
    WorkerPhase.STARTING: PoolMemberPhase.LOADING,
    WorkerPhase.READY: PoolMemberPhase.READY,
    WorkerPhase.DRAINING: PoolMemberPhase.DRAINING,
    WorkerPhase.GONE: PoolMemberPhase.VACANT,
}


def _no_models(_offer: str) -> tuple[str, ...]:
    return ()


def pool_status(
    pool: Pool,
    provider: str,
    managed: bool,
    now: float,
    wall: float,
    models_of: Callable[[str], tuple[str, ...]] = _no_models,
) -> PoolStatus:
    """Build the pool's status. `now` is the core's monotonic time, `wall` the same instant in Unix seconds.

    `models_of` returns the models of an offer's workers.

    Workers without a pool member follow after the members. They are counted only if the provider is not
    `managed`. If it is `managed`, workers of other pools are left out.
    """
    members = [
        _member(member, now, wall, models_of(member.offer))
        for member in sorted(pool.members.values(), key=lambda s: (s.index, s.name))
    ]
    ours = {member.worker for member in members}
    others = [
        _row(row)
        for row in sorted(pool.rows.values(), key=lambda r: r.id)
        if row.id not in ours and not (managed and _is_of_another_pool(row, pool))
    ]
    phases = [member.phase for member in (members if managed else others)]
    return PoolStatus(
        provider=provider,
        pool=pool.name,
        target=pool.target if managed else None,
        ready=phases.count(PoolMemberPhase.READY),
        starting=sum(phase in STARTING for phase in phases),
        draining=phases.count(PoolMemberPhase.DRAINING),
        members=(*members, *others),
        actions=tuple(
            PoolAction(
                at=wall - (now - action.at),
                member=action.member,
                worker=action.worker,
                action=action.action,
                reason=action.reason,
            )
            for action in pool.actions
        ),
        reason=_problem(pool) if managed else None,
        at=wall,
    )


def _member(member: PoolMember, now: float, wall: float, models: tuple[str, ...]) -> PoolMemberStatus:
    return PoolMemberStatus(
        member=member.name[:64],
        phase=member.phase,
        wanted=member.wanted,
        worker=member.worker,
        pid=member.pid,
        since=max(wall - (now - member.since), 0.0),
        sessions=member.sessions,
        suspended=member.suspended,
        failures=member.failures,
        retry_in_s=max(member.retry_at - now, 0.0) if member.phase is PoolMemberPhase.BACKING_OFF else None,
        reason=member.reason,
        playout=member.playout,
        models=models,
    )


def _is_of_another_pool(row: WorkerRecord, pool: Pool) -> bool:
    return row.pool_member is not None and not pool.owns(row.pool_member)


def _row(row: WorkerRecord) -> PoolMemberStatus:
    return PoolMemberStatus(
        member=row.pool_member or row.id,
        phase=_PHASES[row.phase],
        worker=row.id,
        pid=row.pid,
        since=row.started_at,
        sessions=row.sessions,
        suspended=row.suspended,
        reason="not started by this autoscaler",
        models=tuple(one.model for one in served_classes(row)),
    )


def _problem(pool: Pool) -> str | None:
    if not pool.adopted:
        return "waiting for the provider's list of workers"
    wanted = [member for member in pool.members.values() if member.wanted]
    missing = [member for member in wanted if member.phase is not PoolMemberPhase.READY]
    if not missing:
        silent = pool.store_doubt
        return None if silent is None else f"no list of workers from the state store: {silent}"
    worst = max(missing, key=lambda member: (member.failures, -member.index))
    return f"workers not ready: {len(missing)} of {len(wanted)}; {worst.name}: {worst.reason}"


def scaling_status(controller: Controller, now: float, wall: float) -> ScalingStatus:
    """Build the controller's status. `now` is the core's monotonic time, `wall` the same in Unix seconds."""
    advisor, policy = controller.advisor, controller.policy
    row, hearing = advisor.in_force, advisor.feedback_monitor
    feedback = hearing.feedback
    learned = controller.learner if controller.learning else None
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
        basis="profile" if learned is None else "learned",
        peak_window_s=advisor.peak_window_s,
        forecast_coverage=advisor.forecast.quantile if advisor.predictive else None,
        learned_from_s=None if learned is None else learned.seen_s,
        forecast=advisor.forecast.value if advisor.predictive else None,
        required=feedback.required if feedback is not None else None,
        rho_max=feedback.rho_max if feedback is not None else None,
        feedback_age_s=hearing.age_s(now),
        stale=hearing.is_stale(now),
        decoding=advisor.decode_workers.need(feedback, advisor.row.target_utilization),
        refused=dict(hearing.refused),
        activity=controller.detector.activity,
        table=controller.table.provenance,
        table_differs=_differs(controller),
        decisions=tuple(scaling_record(decision, now, wall) for decision in controller.decisions),
    )


def pool_sample(pool: Pool, controller: Controller, now: float) -> PoolSample:
    """Build the pool's state for its history. Stale load feedback is left out."""
    phases = [member.phase for member in pool.members.values()]
    hearing, row = controller.advisor.feedback_monitor, controller.advisor.in_force
    volatility = controller.detector.volatility
    sample = PoolSample(
        ready=phases.count(PoolMemberPhase.READY),
        starting=sum(phase in STARTING for phase in phases),
        draining=phases.count(PoolMemberPhase.DRAINING),
        target=controller.target,
        volatility=min(volatility, VOLATILITY_LIMIT) if volatility >= 0 else None,
        target_utilization=row.target_utilization,
    )
    feedback = hearing.feedback
    if feedback is None or hearing.is_stale(now):
        return sample
    names = ("capacity", "required", "waiting", "rho_max", "quality_debt", "deficit")
    return sample.model_copy(update={name: getattr(feedback, name) for name in names})


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


def export(status: PoolStatus, feedback: LoadFeedback | None, gpus: float, maximum: int) -> None:
    """Set the gauges of the pool and of its control, as of `status` and the newest load feedback.

    `gpus`: GPUs of all workers of the pool. `maximum`: workers to which the pool may grow by itself.
    """
    for phase in PoolMemberPhase:
        found = sum(member.phase is phase for member in status.members)
        metrics.members.set(found, {POOL_MEMBER_PHASE: phase.value})
    metrics.gpus.set(gpus)
    if feedback is not None:
        metrics.sessions_required.set(feedback.required)
        metrics.sessions_capacity.set(feedback.capacity)
        metrics.utilization_max.set(feedback.rho_max)
    if status.scaling is not None:
        metrics.workers_target.set(status.scaling.target)
        metrics.workers_maximum.set(maximum)
        metrics.utilization_target.set(status.scaling.target_utilization)
        metrics.volatility.set(status.scaling.volatility)
        metrics.feedback_stale.set(int(status.scaling.stale))
        if (counts := decode_workers_of(status.scaling.decoding, feedback)) is not None:
            metrics.decode_workers.set(counts[0])
            metrics.decode_workers_needed.set(counts[1])


def decode_workers_of(decoding: DecodeNeed | None, feedback: LoadFeedback | None) -> tuple[int, int] | None:
    """Return the number of decode workers and how many are needed, as gauges say it. None: as before.

    Of an unknown number, one is needed: it says what it carries.
    """
    if decoding is not None:
        return decoding.workers, 1 if decoding.needed is None else decoding.needed
    if feedback is None or (feedback.required and not feedback.workers):
        # Workers that are away may have decode workers again.
        return None
    return 0, 0


def forget() -> None:
    """Set the gauges of the pool to 0, because another process runs it from now on."""
    for phase in PoolMemberPhase:
        metrics.members.set(0, {POOL_MEMBER_PHASE: phase.value})
    for gauge in (
        metrics.gpus,
        metrics.sessions_required,
        metrics.sessions_capacity,
        metrics.utilization_max,
        metrics.workers_target,
        metrics.workers_maximum,
        metrics.utilization_target,
        metrics.volatility,
        metrics.feedback_stale,
        metrics.decode_workers,
        metrics.decode_workers_needed,
    ):
        gauge.set(0)


def is_ready(pool: Pool, managed: bool) -> bool:
    """Whether running workers are adopted and, if `managed`, each wanted worker is ready or has failed once.

    So an autoscaler whose workers cannot start becomes ready and reports the reason in its status.
    """
    if not pool.adopted:
        return False
    # A place may take long to be given up, and another offer's worker serves there until then.
    wanted = [member for member in pool.members.values() if member.wanted and member.waits_for is None]
    return not managed or all(
        member.phase is PoolMemberPhase.READY or member.failures > 0 for member in wanted
    )
