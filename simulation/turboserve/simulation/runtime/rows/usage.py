"""Rows of usage by day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.usage import UsageDay
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.state_store.core.usage import COUNTED


class Used(NamedTuple):
    """What is added to a row."""

    gpu_seconds: float = 0.0
    money: float = 0.0
    chunks: int = 0
    video_seconds: float = 0.0
    viewer_seconds: float = 0.0
    delivered_bytes: int = 0


def lock_usage(db: Session, day: int, shares: Mapping[tuple[str, str], Used]) -> None:
    """Insert the missing rows of tenants and keys, and lock all, in their order. Part of a statement."""
    rows = db.tables.usage_days
    for tenant, key in sorted(shares):
        first = UsageDay(
            day=day, tenant=tenant, key=key or None, gpu_seconds=0, money=0, chunks=0, viewer_seconds=0
        )
        if db.lock(rows, (day, tenant, key), LockMode.NO_KEY_UPDATE) is None:
            db.insert_if_absent(rows, (day, tenant, key), first)


def add_usage(db: Session, day: int, shares: Mapping[tuple[str, str], Used]) -> None:
    """Add to rows that `lock_usage` has locked. Part of the same statement."""
    rows = db.tables.usage_days
    for (tenant, key), used in sorted(shares.items()):
        before = db.get(rows, (day, tenant, key))
        assert before is not None
        sums = {name: getattr(before, name) + value for name, value in used._asdict().items()}
        sums |= {name: min(sums[name], NUMBER_LIMIT) for name in COUNTED}
        db.update(rows, (day, tenant, key), before.model_copy(update=sums))
