"""Usage: by day, tenant and key, and by hour, tenant, key and model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    ARRAY,
    CTE,
    BindParameter,
    ColumnElement,
    Integer,
    Table,
    bindparam,
    cast,
    delete,
    func,
    literal_column,
    select,
    tuple_,
)
from sqlalchemy.dialects.postgresql import Insert
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.usage import HOURS, ListUsage, UsageDimension, UsagePage
from turboserve.state_store.access_tables import usage_days, usage_hours
from turboserve.state_store.core.usage import COUNTED, FINE, SUMMED, Place, dimensions, page_of
from turboserve.state_store.ports.records import UsageShare

_OWNER = "tenant", "key", "model"
_SHARED = "chunks", "video_seconds", "viewer_seconds", "delivered_bytes"
"""Columns that `UsageShare` adds to."""
_DAY, _HOUR = bindparam("in_day", type_=Integer), bindparam("in_hour", type_=Integer)
# No parameter: the expression stands in GROUP BY as well.
_DAY_OF_HOUR: ColumnElement[int] = literal_column(f"usage_hours.hour / {HOURS}", Integer)

# Built once: SQLAlchemy takes longer to build such a statement and its cache key than to execute it.
_USED = (
    func.unnest(
        *(
            cast(bindparam(f"used_{name}"), ARRAY(type(usage_hours.c[name].type)))
            for name in (*_OWNER, *_SHARED)
        )
    )
    .table_valued(*_OWNER, *_SHARED, name="used")
    .render_derived()
)


def _limited(sums: dict[str, ColumnElement[Any]]) -> dict[str, ColumnElement[Any]]:
    # No message carries a greater count.
    return sums | {name: func.least(sums[name], NUMBER_LIMIT) for name in COUNTED}


def _added_to(table: Table, at: BindParameter[int], after: CTE | None = None) -> Insert:
    """Return the statement that adds `_USED` to the rows of one time, once `after` is done.

    The rows come in a fixed order, so that two transactions never wait for each other.
    """
    time, *owner = table.primary_key.columns.keys()
    by = [_USED.c[name] for name in owner]
    sums = _limited({name: func.sum(_USED.c[name]) for name in _SHARED})
    given = select(at, *by, *sums.values()).group_by(*by).order_by(*by)
    if after is not None:
        given = given.where(select(func.count()).select_from(after).scalar_subquery() >= 0)
    query = pg_insert(table).from_select([time, *owner, *_SHARED], given)
    added = _limited({name: table.c[name] + query.excluded[name] for name in _SHARED})
    return query.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=added)


_DAYS = _added_to(usage_days, _DAY).returning(usage_days.c.day).cte("days")
_ADD = _added_to(usage_hours, _HOUR, _DAYS)


async def add(db: AsyncConnection, hour: int, shares: Iterable[UsageShare]) -> None:
    """Add shares to the usage of an hour and of its day."""
    sums = UsageShare.by_owner(shares)
    if not sums:
        return
    columns = {name: [getattr(share, name) for share in sums] for name in (*_OWNER, *_SHARED)}
    columns["key"] = [share.key or "" for share in sums]
    values: dict[str, Any] = {f"used_{name}": column for name, column in columns.items()}
    await db.execute(_ADD, {_DAY.key: hour // HOURS, _HOUR.key: hour, **values})


async def page(db: AsyncConnection, request: ListUsage) -> UsagePage:
    """See `RentalRepository.usage`."""
    names = dimensions(request.group_by)
    order: dict[UsageDimension, ColumnElement[Any]]
    if FINE.isdisjoint(names):
        table, when = usage_days, usage_days.c.day.between(request.from_day, request.to_day)
        order = {name: usage_days.c[name] for name in names}
    else:
        table, hours = usage_hours, (HOURS * request.from_day, HOURS * request.to_day + HOURS - 1)
        when = usage_hours.c.hour.between(*hours)
        order = {name: _DAY_OF_HOUR if name is UsageDimension.DAY else usage_hours.c[name] for name in names}
    by = [column.label(name) for name, column in order.items()]
    totals = _limited({name: func.sum(table.c[name]) for name in SUMMED})
    sums = [total.cast(table.c[name].type).label(name) for name, total in totals.items()]
    query = select(*by, *sums) if request.group_by else select(usage_days)
    query = query.where(when).order_by(*order.values()).limit(request.limit + 1)
    if request.group_by:
        query = query.group_by(*order.values())
    if request.tenant is not None:
        query = query.where(table.c.tenant == request.tenant)
    after = Place.parse(request.after)
    if after is not None:
        query = query.where(tuple_(*order.values()) > tuple_(*(getattr(after, name) for name in names)))
    rows = (await db.execute(query)).mappings().all()
    return page_of([dict(row) for row in rows], request.limit, request.group_by)


async def forget(db: AsyncConnection, before_day: int) -> None:
    """Delete the usage of earlier days."""
    await db.execute(delete(usage_days).where(usage_days.c.day < before_day))
    await db.execute(delete(usage_hours).where(usage_hours.c.hour < HOURS * before_day))
