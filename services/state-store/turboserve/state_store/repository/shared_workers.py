"""Counts the room of workers that serve several classes."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import ColumnElement, Integer, Text, bindparam, cast, func, or_, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.workers import WorkerPhase
from turboserve.state_store.core.class_room import SharedWorker, class_capacity
from turboserve.state_store.repository.sessions import LIVE
from turboserve.state_store.tables import pools, sessions, workers


def declares(model: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether a worker's row has the class among several."""
    return workers.c.classes.contains(func.jsonb_build_array(func.jsonb_build_object("model", model)))


async def shared_capacity(
    db: AsyncConnection,
    model: str,
    renewed_after: float,
    takes: tuple[str, ...],
    holds: ColumnElement[bool],
    waits: ColumnElement[bool],
) -> int:
    """Return the slots for a class of workers that serve several, and of those that their pools may add.

    It may be below 0 (`class_capacity`).

    `takes`: phases in which a worker counts. `holds`, `waits`: whether a session holds a slot, or wants one.
    """
    live = (await db.execute(_LIVE.where(workers.c.renewed_at > renewed_after))).all()
    alive = {row.id for row in live}
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    waiting: Counter[str] = Counter()
    query = select(sessions.c.worker, sessions.c.target, sessions.c.model, holds.label("holds"), func.count())
    query = query.where(LIVE, or_(holds, waits))
    grouped = query.group_by(sessions.c.worker, sessions.c.target, sessions.c.model, holds)
    for worker, target, of, holding, count in (await db.execute(grouped)).all():
        here = {worker, target} & alive if holding else set()
        for name in here:
            held[name][of] += count
        if not here:
            waiting[of] += count
    shared = [row for row in live if row.phase in takes and model in _served(row)]
    serving = [SharedWorker(_served(row), held[row.id]) for row in shared]
    # A worker that a pool may still start will have no sessions, and the largest n of those that are known.
    # Gone ones count, since a pool may have no other at the moment.
    first, largest = set[str](), dict[str, int]()
    for of, name, capacity in (await db.execute(_DECLARED, {"model": model})).all():
        first.add(of)
        largest[name] = max(largest.get(name, 0), capacity)
    ready = [row for row in shared if row.phase == WorkerPhase.READY.value]
    coming = await _coming(db, first - {model}, ready, renewed_after)
    return class_capacity(model, serving, waiting, largest) + coming * largest.get(model, 0)


_LIVE = select(workers.c.id, workers.c.model, workers.c.phase, workers.c.classes).where(
    workers.c.phase != WorkerPhase.GONE.value
)


_CLASS = func.jsonb_array_elements(workers.c.classes, type_=JSONB).column_valued(
    "class", joins_implicitly=True
)
_DECLARED = (
    select(
        workers.c.model,
        _CLASS["model"].astext.label("name"),
        func.max(cast(_CLASS["capacity"].astext, Integer)),
    )
    .where(declares(bindparam("model", type_=Text)))
    .group_by(workers.c.model, "name")
)


def _served(row: Any) -> dict[str, int]:
    return {one["model"]: one["capacity"] for one in row.classes or ()}


async def _coming(db: AsyncConnection, first: set[str], ready: list[Any], renewed_after: float) -> int:
    """Number of workers that pools may add. A pool reports its workers' first class alone, and its own
    additions to that class are counted there. So `first` has the others' first classes."""
    if not first:
        return 0
    heard = select(func.coalesce(func.sum(pools.c.maximum), 0)).where(
        pools.c.model.in_(first), pools.c.reported_at > renewed_after
    )
    maximum = int((await db.execute(heard)).scalar_one())
    return max(maximum - sum(row.model in first for row in ready), 0)
