"""Explains a pool's state in a sentence or two."""

from __future__ import annotations

from turboserve.contracts.autoscale import ScalingStatus
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.gateway.pools.snapshots import SILENT_S, PoolSnapshot


def summary(snapshot: PoolSnapshot, operator: bool = True) -> str:
    """Return the most serious reason for the pool's state, without details for one who is no operator."""
    status = snapshot.status
    if snapshot.age_s > SILENT_S:
        return f"No report from the autoscaler for {snapshot.age_s:.0f} s. Its workers continue."
    if status.provider_error is not None:
        return f"Provider error: {status.provider_error}." if operator else "The provider reports an error."
    if status.reason is not None:
        return f"{_capital(status.reason)}." if operator else "The pool is not as wanted yet."
    if status.scaling is None:
        return f"{_count(status.ready, 'worker')}, started by another system."
    if status.orders is None:
        return "Waiting for the stored override; pool size unchanged."
    if status.draining:
        held = sum(m.sessions + m.suspended for m in status.members if m.phase is PoolMemberPhase.DRAINING)
        are = "is" if status.draining == 1 else "are"
        sessions = _count(held, "session")
        return f"{_count(status.draining, 'worker')} {are} draining; {sessions} must migrate first."
    return _scaling(status.scaling)


def _scaling(scaling: ScalingStatus) -> str:
    workers = _count(scaling.target, "worker")
    if scaling.mode in ("override", "dry_run"):
        mode = "Override" if scaling.mode == "override" else "Dry run"
        return f"{mode}: {workers}. The controller wants {scaling.advice}."
    if scaling.least == scaling.most:
        return f"{workers}. The pool has a fixed size."
    if scaling.stale:
        which = "No load report yet" if scaling.feedback_age_s is None else "No recent load report"
        return f"{which}; not scaling in."
    decoding = scaling.decoding
    if decoding is not None and decoding.limits and (decoding.needed or 0) > decoding.workers:
        need = f"{decoding.needed} are needed, and {decoding.workers} known"
        return f"{workers}. Decode workers are the limit: {need}."
    changes = [d for d in scaling.decisions if d.target != d.previous]
    if changes:
        last = changes[-1]
        return f"{workers}. Last change, {last.previous} → {last.target}: {last.reason}."
    return f"{workers}. No reason to change the size."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
