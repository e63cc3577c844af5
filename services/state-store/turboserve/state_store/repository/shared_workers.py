"""Counts the room of workers that serve several classes."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Double,
    Integer,
    Select,
    Text,
    and_,
    any_,
    bindparam,
    cast,
    exists,
    func,
    not_,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB, JSONPATH
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.workers import WorkerPhase
from turboserve.state_store.core.class_room import SharedRoom, SharedWorker, class_capacity
from turboserve.state_store.repository.sessions import LIVE
from turboserve.state_store.tables import pools, sessions, workers


def declares(model: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether a worker's row has the class among several."""
    return workers.c.classes.contains(func.jsonb_build_array(func.jsonb_build_object("model", model)))


def slots_query(holds: ColumnElement[bool], waits: ColumnElement[bool]) -> Select[Any]:
    """Return the query for sessions that hold a slot (`holds`) or want one (`waits`), by worker and class."""
    query = select(sessions.c.worker, sessions.c.target, sessions.c.model, holds.label("holds"), func.count())
    query = query.where(LIVE, or_(holds, waits))
    return query.group_by(sessions.c.worker, sessions.c.target, sessions.c.model, holds)


async def shared_room(
    db: AsyncConnection, model: str, renewed_after: float, takes: tuple[str, ...], slots: Select[Any]
) -> SharedRoom:
    """Return the room for a class on workers that serve several.

    `takes`: phases in which a worker counts. `slots`: the query of `slots_query`.
    """
    live = (await db.execute(_LIVE, {"renewed_after": renewed_after})).all()
    # Sessions on other workers, such as those that drain, need slots of these.
    taking = {row.id for row in live if row.phase in takes}
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    waiting: Counter[str] = Counter()
    for worker, target, of, holding, count in (await db.execute(slots)).all():
        here = {worker, target} & taking if holding else set()
        for name in here:
            held[name][of] += count
        if not here:
            waiting[of] += count
    served = {row.id: dict(zip(row.names, row.slots, strict=True)) for row in live if row.names}
    serving = [
        SharedWorker(served[name], held[name]) for name in taking & served.keys() if model in served[name]
    ]
    # A worker that a pool may still start will have no sessions, and the largest n of those that are known.
    # Gone ones count, since a pool may have no other at the moment. They do not if all its present workers
    # serve one class: the pool was then changed to serve one.
    first, largest = set[str](), dict[str, int]()
    values = {"model": model, "renewed_after": renewed_after}
    for of, name, capacity in (await db.execute(_DECLARED, values)).all():
        first.add(of)
        largest[name] = max(largest.get(name, 0), capacity)
    # Pools do not report whether their workers serve several classes. So those of one count, too.
    ready = [row.model for row in live if row.phase == WorkerPhase.READY.value]
    coming = await _coming(db, first - {model}, ready, renewed_after)
    return SharedRoom(class_capacity(model, serving, waiting, largest), coming, largest.get(model, 0))


def _of_classes(field: str) -> ColumnElement[Any]:
    return func.jsonb_path_query_array(workers.c.classes, cast(f"$[*].{field}", JSONPATH), type_=JSONB)


_RENEWED_AFTER = bindparam("renewed_after", type_=Double)
_LIVE = select(
    workers.c.id,
    workers.c.model,
    workers.c.phase,
    _of_classes("model").label("names"),
    _of_classes("capacity").label("slots"),
).where(workers.c.phase != WorkerPhase.GONE.value, workers.c.renewed_at > _RENEWED_AFTER)
_MAXIMUM = select(func.coalesce(func.sum(pools.c.maximum), 0)).where(
    pools.c.model == any_(bindparam("models", type_=ARRAY(Text))), pools.c.reported_at > _RENEWED_AFTER
)
_CLASS = func.jsonb_array_elements(workers.c.classes, type_=JSONB).column_valued(
    "class", joins_implicitly=True
)
_OTHERS = workers.alias("others")
_RUNS = and_(
    _OTHERS.c.model == workers.c.model,
    _OTHERS.c.phase != WorkerPhase.GONE.value,
    _OTHERS.c.renewed_at > _RENEWED_AFTER,
)
_DECLARED = (
    select(
        workers.c.model,
        _CLASS["model"].astext.label("name"),
        func.max(cast(_CLASS["capacity"].astext, Integer)),
    )
    .where(
        declares(bindparam("model", type_=Text)),
        or_(not_(exists().where(_RUNS)), exists().where(_RUNS, _OTHERS.c.classes.is_not(None))),
    )
    .group_by(workers.c.model, "name")
)


async def _coming(db: AsyncConnection, first: set[str], ready: list[str], renewed_after: float) -> int:
    """Number of workers that pools may add. A pool reports its workers' first class alone, and its own
    additions to that class are counted there. So `first` has the others' first classes."""
    if not first:
        return 0
    found = await db.execute(_MAXIMUM, {"models": list(first), "renewed_after": renewed_after})
    return max(int(found.scalar_one()) - sum(model in first for model in ready), 0)
