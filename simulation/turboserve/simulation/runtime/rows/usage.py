"""Rows of usage: by day, and by hour and model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.usage import HOURS, ListUsage, UsageDay, UsageGroup, UsagePage
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.state_store.core.usage import COUNTED, FINE, SUMMED, Place, dimensions, page_of

_NOTHING: Mapping[str, Any] = dict.fromkeys(SUMMED, 0)


class Used(NamedTuple):
    """What is added to a row."""

    gpu_seconds: float = 0.0
    money: float = 0.0
    chunks: int = 0
    video_seconds: float = 0.0
    viewer_seconds: float = 0.0
    delivered_bytes: int = 0


Shares = Mapping[tuple[str, str, str], Used]
"""What is added, by tenant, key and model."""


def lock_usage(db: Session, hour: int, shares: Shares) -> None:
    """Insert the missing rows of an hour and its day, and lock all, in their order. Part of a statement."""
    days, hours, day = db.tables.usage_days, db.tables.usage_hours, hour // HOURS
    for tenant, key in sorted({place[:2] for place in shares}):
        if db.lock(days, (day, tenant, key), LockMode.NO_KEY_UPDATE) is None:
            of_day = UsageDay(day=day, tenant=tenant, key=key or None, **_NOTHING)
            db.insert_if_absent(days, (day, tenant, key), of_day)
    for tenant, key, model in sorted(shares):
        place = hour, tenant, key, model
        if db.lock(hours, place, LockMode.NO_KEY_UPDATE) is None:
            group = UsageGroup(
                day=day, hour=hour, tenant=tenant, key=key or None, model=model or None, **_NOTHING
            )
            db.insert_if_absent(hours, place, group)


def add_usage(db: Session, hour: int, shares: Shares) -> None:
    """Add to rows that `lock_usage` has locked. Part of the same statement."""
    days, hours, day = db.tables.usage_days, db.tables.usage_hours, hour // HOURS
    for (tenant, key, model), used in sorted(shares.items()):
        of_day = db.get(days, (day, tenant, key))
        assert of_day is not None
        db.update(days, (day, tenant, key), of_day.model_copy(update=_sums(of_day, used)))
        of_hour = db.get(hours, (hour, tenant, key, model))
        assert of_hour is not None
        db.update(hours, (hour, tenant, key, model), of_hour.model_copy(update=_sums(of_hour, used)))


def _sums(before: UsageDay | UsageGroup, used: Used) -> dict[str, float]:
    sums: dict[str, float] = {name: getattr(before, name) + value for name, value in used._asdict().items()}
    return sums | {name: min(sums[name], NUMBER_LIMIT) for name in COUNTED}


def usage_page(db: Session, request: ListUsage) -> UsagePage:
    """See `RentalRepository.usage`. Part of a statement."""
    after, named = Place.parse(request.after), dimensions(request.group_by)
    found: list[dict[str, Any]]
    if FINE.isdisjoint(named):
        days = sorted(db.all(db.tables.usage_days), key=lambda item: item[0])
        found = [row.model_dump() | {"key": key} for (_, _, key), row in days]
    else:
        hours = sorted(db.all(db.tables.usage_hours), key=lambda item: item[0])
        found = [row.model_dump() | {"key": key, "model": model} for (_, _, key, model), row in hours]
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in found:
        here = request.from_day <= row["day"] <= request.to_day
        if not here or request.tenant not in (None, row["tenant"]):
            continue
        place = tuple(row[name] for name in named)
        group = sums.setdefault(place, dict(zip(named, place, strict=True)) | dict.fromkeys(SUMMED, 0))
        group.update({name: group[name] + row[name] for name in SUMMED})
    if after is not None:
        reached = tuple(getattr(after, name) for name in named)
        sums = {place: group for place, group in sums.items() if place > reached}
    return page_of([sums[place] for place in sorted(sums)], request.limit, request.group_by)


def forget_usage(db: Session, before_day: int) -> None:
    """Delete the usage of earlier days. Part of a statement."""
    days, hours = db.tables.usage_days, db.tables.usage_hours
    for of_day, _ in db.all(days):
        if of_day[0] < before_day and db.lock(days, of_day) is not None:
            db.delete(days, of_day)
    for of_hour, _ in db.all(hours):
        if of_hour[0] < HOURS * before_day and db.lock(hours, of_hour) is not None:
            db.delete(hours, of_hour)
