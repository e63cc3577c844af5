"""Counting what there is room for."""

from __future__ import annotations

from sqlalchemy import and_, exists, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import Activity, Phase
from turboserve.contracts.workers import WorkerPhase
from turboserve.state_store.core.workers import Room
from turboserve.state_store.ports.records import Census
from turboserve.state_store.repository.sessions import LIVE
from turboserve.state_store.tables import pools, sessions, workers

LOCK = 0x7475_7262_0003

_HOLDS = sessions.c.phase.in_([phase.value for phase in Phase if phase.holds_slot])
_WAITS = or_(
    sessions.c.phase == Phase.REQUESTED.value,
    and_(sessions.c.phase == Phase.SUSPENDED.value, sessions.c.activity == Activity.WATCHING.value),
)
_TAKES = (WorkerPhase.STARTING.value, WorkerPhase.READY.value)


class SqlAdmission:
    """`AdmissionRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def lock(self) -> None:
        await self._db.execute(text("select pg_advisory_xact_lock(:key)"), {"key": LOCK})

    async def census(self, session: str, model: str, *, renewed_after: float, known_after: float) -> Census:
        takes = and_(workers.c.phase.in_(_TAKES), workers.c.renewed_at > renewed_after)
        places = func.coalesce(func.sum(workers.c.capacity).filter(takes), 0)
        largest = func.coalesce(func.max(workers.c.capacity), 1)
        heard = and_(pools.c.model == model, pools.c.reported_at > renewed_after)
        maximum = select(func.coalesce(func.sum(pools.c.maximum), 0)).where(heard).scalar_subquery()
        # One that still loads names no place of its own yet.
        ready = and_(takes, workers.c.phase == WorkerPhase.READY.value)
        coming = func.greatest(maximum - func.count().filter(ready), 0)
        capacity = select(places + coming * func.greatest(largest, 1)).where(workers.c.model == model)
        demand = select(func.count()).where(sessions.c.model == model, LIVE, or_(_HOLDS, _WAITS))
        query = select(
            exists().where(sessions.c.id == session),
            select(func.count()).select_from(sessions).where(LIVE).scalar_subquery(),
            or_(
                exists().where(workers.c.model == model, workers.c.renewed_at > known_after),
                exists().where(heard, pools.c.maximum > 0),
            ),
            capacity.scalar_subquery(),
            demand.scalar_subquery(),
        )
        taken, live, known, places, wanted = (await self._db.execute(query)).one()
        return Census(taken, live, Room(model, known, places, wanted))

    async def slots_used(self, worker: str, *, besides: str) -> int:
        here = or_(sessions.c.worker == worker, sessions.c.target == worker)
        query = select(func.count()).where(here, LIVE, _HOLDS, sessions.c.id != besides)
        return int((await self._db.execute(query)).scalar_one())
