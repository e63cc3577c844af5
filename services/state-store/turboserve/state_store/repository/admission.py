"""Counts sessions and capacity for admission, and keeps the rows of tenants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Double,
    Row,
    ScalarSelect,
    Select,
    Text,
    Update,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal,
    not_,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import Activity, Phase
from turboserve.contracts.workers import WorkerPhase
from turboserve.state_store.core.forecast import Outlook
from turboserve.state_store.core.session_spans import SessionTimes
from turboserve.state_store.core.tenants import Tenant, TenantUse
from turboserve.state_store.core.workers import ModelCapacity
from turboserve.state_store.ports.records import AdmissionCounts
from turboserve.state_store.repository.behavior import session_times, session_times_query
from turboserve.state_store.repository.sessions import LIVE
from turboserve.state_store.repository.shared_workers import declares, shared_room, slots_query
from turboserve.state_store.tables import pools, rentals, sessions, tenants, workers

ADMISSION_LOCK = 0x7475_7262_0003
"""Number of the advisory lock that lets one transaction at a time count and admit."""

_HOLDS = sessions.c.phase.in_([phase.value for phase in Phase if phase.holds_slot])
WAITS = or_(
    sessions.c.phase == Phase.REQUESTED.value,
    and_(sessions.c.phase == Phase.SUSPENDED.value, sessions.c.activity == Activity.WATCHING.value),
)
TAKES_SLOT = or_(_HOLDS, WAITS)
"""The session holds a slot or waits for one."""
_TAKES = (WorkerPhase.STARTING.value, WorkerPhase.READY.value)


def _decode_sessions(heard: ColumnElement[bool]) -> ScalarSelect[Any]:
    """Sessions that the decode workers of pools carry. NULL: no decode workers limit them."""
    return select(func.max(pools.c.decode_sessions)).where(heard).scalar_subquery()


def _census_query(*, locks_tenant: bool) -> Select[Any]:
    session, tenant = bindparam("session", type_=Text), bindparam("tenant", type_=Text)
    model = bindparam("model", type_=Text)
    renewed_after, known_after = (
        bindparam("renewed_after", type_=Double),
        bindparam("known_after", type_=Double),
    )
    takes = and_(workers.c.phase.in_(_TAKES), workers.c.renewed_at > renewed_after)
    heard = and_(pools.c.model == model, pools.c.reported_at > renewed_after)
    # Until more capacity has come, workers may hold K_floor. But it comes only for as many as fit then.
    absorbs = exists().where(heard, pools.c.absorbs_at_maximum)
    # GREATEST ignores NULL.
    held = case(
        (absorbs, func.greatest(workers.c.capacity, workers.c.floor_capacity)), else_=workers.c.capacity
    )
    # The room of workers that serve several classes is counted apart: it depends on their sessions.
    places = func.coalesce(func.sum(held).filter(takes, workers.c.classes.is_(None)), 0)
    largest = func.coalesce(func.max(workers.c.capacity), 1)
    maximum = select(func.coalesce(func.sum(pools.c.maximum), 0)).where(heard).scalar_subquery()
    # A worker that still loads reports no capacity yet.
    ready = and_(takes, workers.c.phase == WorkerPhase.READY.value)
    coming = func.greatest(maximum - func.count().filter(ready), 0)
    added = coming * func.greatest(largest, 1)
    # Each pool says what is carried for all workers of the model. Present workers report no more than that.
    carried = func.coalesce(_decode_sessions(heard), places + added)
    added = func.least(added, func.greatest(carried - places, 0))
    capacity = select(places + added).where(workers.c.model == model)
    wants, ours = TAKES_SLOT, sessions.c.tenant == tenant
    suspended = and_(ours, sessions.c.phase == Phase.SUSPENDED.value, not_(WAITS))
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
    query = select(
        exists().where(sessions.c.id == session),
        or_(
            exists().where(
                or_(workers.c.model == model, declares(model)), workers.c.renewed_at > known_after
            ),
            exists().where(heard),
        ),
        capacity.scalar_subquery(),
        exists().where(declares(model)),
        exists().where(tenants.c.id == tenant),
        exists().where(tenants.c.id != tenant),
        counts,
    )
    if not locks_tenant:
        return query
    row = select(tenants).where(tenants.c.id == tenant).with_for_update().cte("tenant_row")
    columns = (row.c[name].label(f"tenant_{name}") for name in _TENANT)
    return query.add_columns(*columns).select_from(counts.outerjoin(row, true()))


_TENANT = tuple(Tenant.__dataclass_fields__)
# Built once, since building the query takes several times as long as running it.
_CENSUS, _CENSUS_LOCKED = _census_query(locks_tenant=False), _census_query(locks_tenant=True)


def _outlook_query() -> Select[Any]:
    model, since = bindparam("model", type_=Text), bindparam("since", type_=Double)
    renewed_after = bindparam("renewed_after", type_=Double)
    heard = and_(pools.c.model == model, pools.c.reported_at > renewed_after)
    absorbs = exists().where(heard, pools.c.absorbs)
    maximum = select(func.coalesce(func.sum(pools.c.maximum), 0)).where(heard).scalar_subquery()
    live = workers.c.renewed_at > renewed_after
    ready = and_(live, workers.c.phase == WorkerPhase.READY.value)
    starts = and_(live, workers.c.phase == WorkerPhase.STARTING.value)
    most = func.greatest(workers.c.capacity, workers.c.floor_capacity)
    held = case((absorbs, most), else_=workers.c.capacity)
    started = (
        select(func.avg(rentals.c.starting_s))
        .join(workers, workers.c.id == rentals.c.worker)
        .where(workers.c.model == model, rentals.c.ready, rentals.c.ended_at.is_(None))
    )
    # Both counts use an index: those of unpurged and of live sessions.
    unpurged = and_(sessions.c.ended_at > since, sessions.c.purged_at.is_(None))
    ended = select(func.count()).where(unpurged, sessions.c.model == model)
    idle = and_(sessions.c.phase == Phase.SUSPENDED.value, not_(WAITS), sessions.c.suspended_at > since)
    suspended = select(func.count()).where(LIVE, idle, sessions.c.model == model)
    return select(
        ended.scalar_subquery().label("ended"),
        suspended.scalar_subquery().label("suspended"),
        func.coalesce(func.sum(held).filter(ready, workers.c.classes.is_(None)), 0).label("ready_slots"),
        exists().where(declares(model), ready).label("shared"),
        func.coalesce(
            func.array_agg(aggregate_order_by(workers.c.started_at, workers.c.started_at)).filter(starts),
            literal([], ARRAY(Double)),
        ).label("starting"),
        func.greatest(maximum - func.count().filter(ready), 0).label("coming"),
        func.greatest(func.coalesce(func.max(workers.c.capacity), 1), 1).label("slots"),
        started.scalar_subquery().label("start_up_s"),
        _decode_sessions(heard).label("decode_sessions"),
    ).where(workers.c.model == model)


_OUTLOOK, _SESSION_TIMES = _outlook_query(), session_times_query(_HOLDS, WAITS)
_HERE = bindparam("worker", type_=Text)
_SLOTS_USED = select(func.count()).where(
    or_(sessions.c.worker == _HERE, sessions.c.target == _HERE),
    LIVE,
    _HOLDS,
    sessions.c.id != bindparam("besides"),
)
_SLOTS_BY_CLASS = _SLOTS_USED.add_columns(sessions.c.model).group_by(sessions.c.model)
_SLOTS_TAKEN = slots_query(_HOLDS, WAITS)
_TENANT_LOCKED = select(tenants).where(tenants.c.id == bindparam("tenant")).with_for_update()
WRITE_TENANT: Update = (
    update(tenants)
    .where(tenants.c.id == bindparam("new_id", type_=Text))
    .values({name: bindparam(f"new_{name}", type_=tenants.c[name].type) for name in _TENANT if name != "id"})
)
"""Replaces the row of a tenant by `tenant_values`."""


def tenant_values(tenant: Tenant) -> Mapping[str, Any]:
    """Return the parameters of `WRITE_TENANT`."""
    return {f"new_{name}": value for name, value in asdict(tenant).items()}


class SqlAdmission:
    """`AdmissionRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def census(
        self,
        session: str,
        model: str,
        tenant: str,
        *,
        renewed_after: float,
        known_after: float,
        locks_tenant: bool = False,
    ) -> AdmissionCounts:
        parameters = {
            "session": session,
            "model": model,
            "tenant": tenant,
            "renewed_after": renewed_after,
            "known_after": known_after,
        }
        row = (await self._db.execute(_CENSUS_LOCKED if locks_tenant else _CENSUS, parameters)).one()
        taken, known, places, shared, known_tenant, others, *_ = row
        if shared:
            room = await shared_room(self._db, model, renewed_after, _TAKES, _SLOTS_TAKEN)
            places = max(0, places + room.with_coming)
        use = TenantUse(row.ours, row.suspended, row.slots, row.model_slots, known_tenant, others)
        capacity = ModelCapacity(model, known, places, row.demand)
        return AdmissionCounts(taken, row.live, capacity, use, _tenant_of(row) if locks_tenant else None)

    async def outlook(self, model: str, *, since: float, renewed_after: float) -> Outlook:
        parameters = {"model": model, "since": since, "renewed_after": renewed_after}
        row = (await self._db.execute(_OUTLOOK, parameters)).one()
        ready_slots, coming, slots = row.ready_slots, row.coming, row.slots
        if row.shared:
            now = (WorkerPhase.READY.value,)
            room = await shared_room(self._db, model, renewed_after, now, _SLOTS_TAKEN)
            ready_slots = max(0, ready_slots + room.slots)
            coming, slots = coming + room.coming, max(slots, room.largest)
        return Outlook(
            left=row.ended + row.suspended,
            ready_slots=ready_slots,
            starting=tuple(row.starting),
            coming=coming,
            slots=slots,
            start_up_s=row.start_up_s,
        ).limited(row.decode_sessions)

    async def session_times(self, model: str, *, since: float) -> tuple[SessionTimes, ...] | None:
        found = await self._db.execute(_SESSION_TIMES, {"model": model, "since": since})
        return session_times(found.all())

    async def slots_used(self, worker: str, *, besides: str) -> int:
        found = await self._db.execute(_SLOTS_USED, {"worker": worker, "besides": besides})
        return int(found.scalar_one())

    async def slots_by_class(self, worker: str, *, besides: str) -> dict[str, int]:
        rows = (await self._db.execute(_SLOTS_BY_CLASS, {"worker": worker, "besides": besides})).all()
        return {model: int(count) for count, model in rows}


def _tenant_of(row: Row[Any]) -> Tenant | None:
    """Return the tenant's row in the census."""
    return None if row.tenant_id is None else Tenant(*row[-len(_TENANT) :])


class SqlTenants:
    """`TenantRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self, tenant: str) -> Tenant:
        row = (await self._db.execute(_TENANT_LOCKED, {"tenant": tenant})).mappings().first()
        if row is None:
            # This waits if another transaction inserts the row at the same time.
            await self._db.execute(insert(tenants).values(id=tenant).on_conflict_do_nothing())
            row = (await self._db.execute(_TENANT_LOCKED, {"tenant": tenant})).mappings().one()
        return Tenant(**row)

    async def write(self, tenant: Tenant) -> None:
        await self._db.execute(WRITE_TENANT, tenant_values(tenant))

    async def delete_unused(self, before: float) -> int:
        full = (tenants.c.creations_full_at < before, tenants.c.prompts_full_at < before)
        return (await self._db.execute(delete(tenants).where(tenants.c.stored_bytes == 0, *full))).rowcount
