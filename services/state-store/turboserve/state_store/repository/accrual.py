"""The statement that gives sessions and pools their shares of the time that was paid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Integer,
    Select,
    Table,
    Update,
    bindparam,
    func,
    literal,
    select,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import Insert
from sqlalchemy.dialects.postgresql import insert as pg_insert

from turboserve.contracts.sessions import Phase
from turboserve.state_store.access_tables import usage_days, usage_hours
from turboserve.state_store.history_tables import pool_costs, pool_model_costs
from turboserve.state_store.tables import rentals, session_costs, sessions

DAY, HOUR = bindparam("on_day", type_=Integer), bindparam("in_hour", type_=Integer)
MINUTE = bindparam("at_minute", type_=BigInteger)
_SUMS = "gpu_seconds", "money"


def _accrual() -> Update:
    due = (
        select(rentals.c.worker, (rentals.c.paid_s - rentals.c.accrued_s).label("seconds"))
        .where(rentals.c.accrued_s < rentals.c.paid_s)
        .with_for_update()
        .cte("due")
    )
    share = due.c.seconds * rentals.c.gpus / func.count().over(partition_by=rentals.c.worker)
    holders = (
        select(
            sessions.c.id,
            sessions.c.tenant,
            func.coalesce(sessions.c.key, "").label("key"),
            sessions.c.model,
            due.c.worker.label("worker"),
            func.coalesce(rentals.c.pool, "").label("pool"),
            share.label("gpu_seconds"),
            (share * rentals.c.price_hour / 3_600.0).label("money"),
        )
        .select_from(
            due.join(rentals, rentals.c.worker == due.c.worker).join(
                sessions, sessions.c.worker == due.c.worker
            )
        )
        .where(sessions.c.ended_at.is_(None), sessions.c.phase.in_([p.value for p in Phase if p.holds_slot]))
        .cte("holders")
    )
    given = _added(session_costs, ("session",), select(holders.c.id, holders.c.gpu_seconds, holders.c.money))
    owner = holders.c.tenant, holders.c.key
    sums = func.sum(holders.c.gpu_seconds), func.sum(holders.c.money)
    by_day = select(DAY, *owner, *sums).group_by(*owner).order_by(*owner)
    days = _added(usage_days, ("day", "tenant", "key"), by_day).returning(usage_days.c.day).cte("used")
    fine = *owner, holders.c.model
    by_hour = select(HOUR, *fine, *sums).group_by(*fine).order_by(*fine)
    # As in `progress`, the rows of the day come first: two transactions never wait for each other.
    by_hour = by_hour.where(select(func.count()).select_from(days).scalar_subquery() >= 0)
    hours = _added(usage_hours, ("hour", "tenant", "key", "model"), by_hour)
    # Time that no session pays has the tenant and the model ''.
    whole = due.c.seconds * rentals.c.gpus
    idle = (
        select(
            func.coalesce(rentals.c.pool, "").label("pool"),
            literal("").label("tenant"),
            literal("").label("model"),
            whole.label("gpu_seconds"),
            (whole * rentals.c.price_hour / 3_600.0).label("money"),
        )
        .select_from(due.join(rentals, rentals.c.worker == due.c.worker))
        .where(due.c.worker.not_in(select(holders.c.worker)))
    )
    columns = holders.c
    held = select(columns.pool, columns.tenant, columns.model, columns.gpu_seconds, columns.money)
    parts = union_all(held, idle).cte("parts")
    costs = []
    for table, name in ((pool_costs, "tenant"), (pool_model_costs, "model")):
        place = parts.c.pool, parts.c[name]
        sums = func.sum(parts.c.gpu_seconds), func.sum(parts.c.money)
        by_place = select(*place, MINUTE, *sums).group_by(*place).order_by(*place)
        costs.append(_added(table, ("pool", name, "at"), by_place).cte(f"cost_by_{name}"))
    paid = (
        update(rentals)
        .where(rentals.c.worker == due.c.worker)
        .values(accrued_s=rentals.c.accrued_s + due.c.seconds)
    )
    return paid.add_cte(given.cte("given"), hours.cte("used_hours"), *costs)


def _added(table: Table, place: Sequence[str], shares: Select[Any]) -> Insert:
    """Return the statement that adds shares to rows of `table`. `place`: their columns before the sums."""
    query = pg_insert(table).from_select([*place, *_SUMS], shares)
    return query.on_conflict_do_update(
        index_elements=list(table.primary_key.columns),
        set_={name: table.c[name] + query.excluded[name] for name in _SUMS},
    )


ACCRUAL = _accrual()
"""The statement of `RentalRepository.accrue`, made once."""
