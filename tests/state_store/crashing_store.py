"""The state store as a process that kills itself at one point: `python crashing_store.py POINT`.

The points are inserted here, from outside: the store itself has none.
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
from turboserve.state_store.publish.fence import Assignments, Fence
from turboserve.state_store.repository.cost import SqlRentals
from turboserve.state_store.repository.progress import SqlFence, SqlOutbox, SqlProgress
from turboserve.state_store.repository.sessions import SqlControls
from turboserve.state_store.service.transactions import PostCommit

MANY_GPUS = 500


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Run `work`, then kill the process: its changes are not committed yet."""

    async def run(*args: Any, **kwargs: Any) -> Any:
        result = await work(*args, **kwargs)
        if result != []:
            die()
        return result

    return run


def put_and_die(put: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Kill the process at a rental of very many GPUs: other rentals belong to earlier tests."""

    async def run(rentals: Any, rows: Any) -> None:
        await put(rentals, rows)
        if any(row.gpus >= MANY_GPUS for row in rows):
            die()

    return run


def give_and_die(accrue: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def run(rentals: Any, day: int, minute: int) -> None:
        await accrue(rentals, day, minute)
        marked = select(func.count()).where(tables.rentals.c.gpus >= MANY_GPUS)
        if (await rentals._db.execute(marked)).scalar_one():
            die()

    return run


POINTS: dict[str, tuple[Any, str, Any]] = {
    "created, nothing published": (PostCommit, "changed", die),
    "placed, nothing published": (PostCommit, "owner_changed", die),
    "placed, fence not begun": (Fence, "settle", die),
    "own in the log, nobody told": (Assignments, "notify", die),
    "own in the log, revision not stored": (SqlFence, "store", die),
    "own in the log, revision not committed": (SqlFence, "store", after(SqlFence.store)),
    "event in the log, not removed": (SqlOutbox, "remove", die),
    "event removed, lock not given up": (SqlOutbox, "remove", after(SqlOutbox.remove)),
    "chunk counted, not committed": (SqlProgress, "count", after(SqlProgress.count)),
    "shares given, not committed": (SqlRentals, "accrue", give_and_die(SqlRentals.accrue)),
    "rentals written, not committed": (SqlRentals, "put", put_and_die(SqlRentals.put)),
    "prompt applied, not committed": (SqlControls, "settle", after(SqlControls.settle)),
}

if __name__ == "__main__":
    owner, name, replacement = POINTS[sys.argv[1]]
    setattr(owner, name, replacement)
    main()
