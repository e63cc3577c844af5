"""The statement that gives sessions and pools their shares of the time that was paid."""

from __future__ import annotations

from sqlalchemy import BigInteger, Integer, Update, bindparam, func, literal, select, union_all, update
from sqlalchemy.dialects.postgresql import insert as pg_insert

from turboserve.contracts.sessions import Phase
from turboserve.state_store.access_tables import usage_days
from turboserve.state_store.history_tables import pool_costs
from turboserve.state_store.tables import rentals, session_costs, sessions

DAY, MINUTE = bindparam("on_day", type_=Integer), bindparam("at_minute", type_=BigInteger)


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
    given = pg_insert(session_costs).from_select(
        ["session", "gpu_seconds", "money"], select(holders.c.id, holders.c.gpu_seconds, holders.c.money)
    )
    given = given.on_conflict_do_update(
        index_elements=[session_costs.c.session],
        set_={
            "gpu_seconds": session_costs.c.gpu_seconds + given.excluded.gpu_seconds,
            "money": session_costs.c.money + given.excluded.money,
        },
    )
    owner = holders.c.tenant, holders.c.key
    sums = func.sum(holders.c.gpu_seconds), func.sum(holders.c.money)
    used = pg_insert(usage_days).from_select(
        ["day", "tenant", "key", "gpu_seconds", "money"],
        select(DAY, *owner, *sums).group_by(*owner).order_by(*owner),
    )
    used = used.on_conflict_do_update(
        index_elements=[usage_days.c.day, usage_days.c.tenant, usage_days.c.key],
        set_={
            "gpu_seconds": usage_days.c.gpu_seconds + used.excluded.gpu_seconds,
            "money": usage_days.c.money + used.excluded.money,
        },
    )
    # Time that no session pays has the tenant ''.
    whole = due.c.seconds * rentals.c.gpus
    idle = (
        select(
            func.coalesce(rentals.c.pool, "").label("pool"),
            literal("").label("tenant"),
            whole.label("gpu_seconds"),
            (whole * rentals.c.price_hour / 3_600.0).label("money"),
        )
        .select_from(due.join(rentals, rentals.c.worker == due.c.worker))
        .where(due.c.worker.not_in(select(holders.c.worker)))
    )
    held = select(holders.c.pool, holders.c.tenant, holders.c.gpu_seconds, holders.c.money)
    parts = union_all(held, idle).cte("parts")
    place = parts.c.pool, parts.c.tenant
    sums = func.sum(parts.c.gpu_seconds), func.sum(parts.c.money)
    cost = pg_insert(pool_costs).from_select(
        ["pool", "tenant", "at", "gpu_seconds", "money"],
        select(*place, MINUTE, *sums).group_by(*place).order_by(*place),
    )
    cost = cost.on_conflict_do_update(
        index_elements=[pool_costs.c.pool, pool_costs.c.tenant, pool_costs.c.at],
        set_={
            "gpu_seconds": pool_costs.c.gpu_seconds + cost.excluded.gpu_seconds,
            "money": pool_costs.c.money + cost.excluded.money,
        },
    )
    paid = (
        update(rentals)
        .where(rentals.c.worker == due.c.worker)
        .values(accrued_s=rentals.c.accrued_s + due.c.seconds)
    )
    return paid.add_cte(given.cte("given"), used.cte("used"), cost.cte("cost"))


ACCRUAL = _accrual()
"""The statement of `RentalRepository.accrue`, made once."""
