"""Counts sessions and capacity for admission, and keeps the rows of tenants."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import (
    Double,
    Select,
    Text,
    and_,
    bindparam,
    delete,
    exists,
    func,
    not_,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import Activity, Phase
from turboserve.contracts.workers import WorkerPhase
from turboserve.state_store.core.tenants import Tenant, TenantUse
from turboserve.state_store.core.workers import ModelCapacity
from turboserve.state_store.ports.records import AdmissionCounts
from turboserve.state_store.repository.sessions import LIVE
from turboserve.state_store.tables import pools, sessions, tenants, workers

LOCK = 0x7475_7262_0003

_HOLDS = sessions.c.phase.in_([phase.value for phase in Phase if phase.holds_slot])
_WAITS = or_(
    sessions.c.phase == Phase.REQUESTED.value,
    and_(sessions.c.phase == Phase.SUSPENDED.value, sessions.c.activity == Activity.WATCHING.value),
)
_TAKES = (WorkerPhase.STARTING.value, WorkerPhase.READY.value)


def _census_query() -> Select[Any]:
    session, tenant = bindparam("session", type_=Text), bindparam("tenant", type_=Text)
    model = bindparam("model", type_=Text)
    renewed_after, known_after = (
        bindparam("renewed_after", type_=Double),
        bindparam("known_after", type_=Double),
    )
    takes = and_(workers.c.phase.in_(_TAKES), workers.c.renewed_at > renewed_after)
    places = func.coalesce(func.sum(workers.c.capacity).filter(takes), 0)
    largest = func.coalesce(func.max(workers.c.capacity), 1)
    heard = and_(pools.c.model == model, pools.c.reported_at > renewed_after)
    maximum = select(func.coalesce(func.sum(pools.c.maximum), 0)).where(heard).scalar_subquery()
    # A worker that still loads reports no capacity yet.
    ready = and_(takes, workers.c.phase == WorkerPhase.READY.value)
    coming = func.greatest(maximum - func.count().filter(ready), 0)
    capacity = select(places + coming * func.greatest(largest, 1)).where(workers.c.model == model)
    wants, ours = or_(_HOLDS, _WAITS), sessions.c.tenant == tenant
    suspended = and_(ours, sessions.c.phase == Phase.SUSPENDED.value, not_(_WAITS))
    # All counts in one pass over the live rows, by their index.
    counts = (
        select(
            func.count().label("live"),
            func.count().filter(wants, sessions.c.model == model).label("demand"),
            func.count().filter(ours).label("ours"),
            func.count().filter(suspended).label("suspended"),
            func.count().filter(ours, wants).label("slots"),
            func.count().filter(ours, wants, sessions.c.model == model).label("model_slots"),
        )
        .where(LIVE)
        .subquery("counts")
    )
    return select(
        exists().where(sessions.c.id == session),
        or_(
            exists().where(workers.c.model == model, workers.c.renewed_at > known_after),
            exists().where(heard, pools.c.maximum > 0),
        ),
        capacity.scalar_subquery(),
        exists().where(tenants.c.id == tenant),
        exists().where(tenants.c.id != tenant),
        counts,
    )


_CENSUS = _census_query()
"""Built once, since building the query takes several times as long as running it."""


class SqlAdmission:
    """`AdmissionRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self) -> None:
        await self._db.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})

    async def census(
        self, session: str, model: str, tenant: str, *, renewed_after: float, known_after: float
    ) -> AdmissionCounts:
        parameters = {
            "session": session,
            "model": model,
            "tenant": tenant,
            "renewed_after": renewed_after,
            "known_after": known_after,
        }
        row = (await self._db.execute(_CENSUS, parameters)).one()
        taken, known, places, known_tenant, others, *_ = row
        use = TenantUse(row.ours, row.suspended, row.slots, row.model_slots, known_tenant, others)
        return AdmissionCounts(taken, row.live, ModelCapacity(model, known, places, row.demand), use)

    async def slots_used(self, worker: str, *, besides: str) -> int:
        here = or_(sessions.c.worker == worker, sessions.c.target == worker)
        query = select(func.count()).where(here, LIVE, _HOLDS, sessions.c.id != besides)
        return int((await self._db.execute(query)).scalar_one())


class SqlTenants:
    """`TenantRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self, tenant: str) -> Tenant:
        query = select(tenants).where(tenants.c.id == tenant).with_for_update()
        row = (await self._db.execute(query)).mappings().first()
        if row is None:
            # This waits if another transaction inserts the row at the same time.
            await self._db.execute(insert(tenants).values(id=tenant).on_conflict_do_nothing())
            row = (await self._db.execute(query)).mappings().one()
        return Tenant(**row)

    async def write(self, tenant: Tenant) -> None:
        values = asdict(tenant)
        await self._db.execute(update(tenants).where(tenants.c.id == values.pop("id")).values(values))

    async def delete_unused(self, before: float) -> int:
        full = (tenants.c.creations_full_at < before, tenants.c.prompts_full_at < before)
        return (await self._db.execute(delete(tenants).where(tenants.c.stored_bytes == 0, *full))).rowcount
