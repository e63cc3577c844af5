"""The state store as a process that kills itself at one point: `python crashing_store.py POINT`.

The points are put in here, from outside: the store itself has none.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import func, select

from turboserve.state_store import tables
from turboserve.state_store.__main__ import main
from turboserve.state_store.publish.assignments import Assignments
from turboserve.state_store.publish.fence import Fence
from turboserve.state_store.repository import controls, fence, outbox, progress, rentals
from turboserve.state_store.service.aftermath import Aftermath

MANY_GPUS = 500


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Do it, then die: what it did is not committed yet."""

    async def run(*args: Any, **kwargs: Any) -> None:
        result = await work(*args, **kwargs)
        if result != []:
            die()
        return result

    return run


def put_and_die(put: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Once there is a rental of very many GPUs: earlier ones belong to the tests before."""

    async def run(db: Any, rows: Any) -> None:
        await put(db, rows)
        if any(row.gpus >= MANY_GPUS for row in rows):
            die()

    return run


def give_and_die(accrue: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def run(db: Any) -> None:
        await accrue(db)
        marked = select(func.count()).where(tables.rentals.c.gpus >= MANY_GPUS)
        if (await db.execute(marked)).scalar_one():
            die()

    return run


POINTS: dict[str, tuple[Any, str, Any]] = {
    "created, nothing published": (Aftermath, "changed", die),
    "placed, nothing published": (Aftermath, "owned_anew", die),
    "placed, fence not begun": (Fence, "settle", die),
    "own in the log, nobody told": (Assignments, "tell", die),
    "own in the log, revision not stored": (fence, "store", die),
    "own in the log, revision not committed": (fence, "store", after(fence.store)),
    "event in the log, not removed": (outbox, "remove", die),
    "event in the log, removal not committed": (outbox, "remove", after(outbox.remove)),
    "chunk counted, not committed": (progress, "count", after(progress.count)),
    "shares given, not committed": (rentals, "accrue", give_and_die(rentals.accrue)),
    "rentals written, not committed": (rentals, "put", put_and_die(rentals.put)),
    "prompt applied, not committed": (controls, "mark_applied", after(controls.mark_applied)),
}

if __name__ == "__main__":
    owner, name, replacement = POINTS[sys.argv[1]]
    setattr(owner, name, replacement)
    main()
