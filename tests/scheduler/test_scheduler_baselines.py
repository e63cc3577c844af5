"""A scheduler process with a placement policy that another distribution installs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from turboserve import subjects
from turboserve.contracts.requests import SessionRef


@pytest.fixture(scope="module")
def times(worker_timeout_s: float) -> dict[str, str]:
    return {
        "TURBOSERVE_LEASE_S": str(worker_timeout_s / 2),
        "TURBOSERVE_WORKER_TIMEOUT_S": str(worker_timeout_s),
        "TURBOSERVE_PLACEMENT": "round-robin",
    }


async def test_sessions_go_round_the_workers(
    scheduler: Any, workers: Callable[..., Awaitable[Any]], viewers: Any
) -> None:
    names = sorted([(await workers(1000)).id for _ in range(3)])
    owners: list[str] = []

    async def place_one() -> None:
        session = await viewers.create()
        owners.append((await viewers.active(session)).worker)
        [decision] = (await viewers.bus.call(subjects.LIST_DECISIONS, SessionRef(session=session))).decisions
        assert decision.reason == "new session: it is the next in turn"

    # A worker that the scheduler does not know yet gets no session.
    while set(owners) != set(names):
        await place_one()
    known = len(owners)
    for _ in range(6):
        await place_one()
    first = names.index(owners[known - 1]) + 1
    assert owners[known:] == [names[(first + turn) % 3] for turn in range(6)]
