"""The objective of all migrations by example: what saves late chunks, and what does not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.scheduler.test_scheduler_slack import HORIZON_S, cluster, proposed
from turboserve.scheduler.placement import (
    Migration,
    MigrationKind,
    ReportedSlack,
    SessionState,
    WorkerState,
)
from turboserve.scheduler.placement.lateness import LARGEST_SESSIONS, lasting_late_chunks, late_chunks
from turboserve.scheduler.placement.pool import LatencyCurve


def rescues(migrations: list[Migration]) -> list[Migration]:
    return [one for one in migrations if one.kind is MigrationKind.RESCUE]


def linear(each_s: float) -> dict[int, float]:
    return {n: each_s * n for n in range(1, 9)}


def test_a_rescue_overloads_no_worker() -> None:
    # A worker keeps up with two sessions of 0.26 s, not with three. One chunk on `a` is late now.
    assert rescues(proposed(cluster({"a": [0.36, 0.5], "b": [3.0, 3.0]}, linear(0.26)))) == []
    [one] = rescues(proposed(cluster({"a": [0.36, 0.5], "b": [3.0]}, linear(0.26))))
    assert (one.session, one.target) == ("a-0", "b")


def test_each_session_of_an_overloaded_worker_counts() -> None:
    curve = LatencyCurve({1: 0.02, 100: 2.0}, 100)
    lasting = [lasting_late_chunks(curve, n, HORIZON_S) for n in range(LARGEST_SESSIONS - 4, 100)]
    assert all(less < more for less, more in pairwise(lasting))
    soon = [late_chunks(curve, [0.5] * n, HORIZON_S) for n in range(LARGEST_SESSIONS - 4, 100)]
    assert all(less < more for less, more in pairwise(soon))
    # A worker that keeps up with all its sessions makes up for one late chunk.
    fast = LatencyCurve({1: 0.005, 100: 0.5}, 100)
    assert late_chunks(fast, [0.0, *[3.0] * 99], HORIZON_S) <= 1


def test_slack_is_used_where_a_worker_of_the_pool_reports_it() -> None:
    there = cluster({"a": [], "b": []})
    for index in range(4):
        # All have been on `b` before, so with slack none may return there.
        there.put_session(SessionState(f"a-{index}", "m", "a", left={"b": 1}))
    there.put_worker(WorkerState("other", "n", 6, chunk_latency_s=linear(0.1)))
    there.put_session(SessionState("there", "n", "other"))
    plain = proposed(there, rescue_horizon_s=0.0)
    assert {one.target for one in plain} == {"b"}
    there.put_slack("there", ReportedSlack(1.0, 0.5, 0.0))
    assert proposed(there) == plain
    there.put_slack("a-0", ReportedSlack(1.0, 0.5, 0.0))
    assert proposed(there) == []
    # A draining worker's report is one, too; and a gone worker's is none.
    there.put_slack("a-0", None)
    there.put_worker(WorkerState("c", "m", 6, ready=False, draining=True))
    there.put_session(SessionState("c-0", "m", "c", movable=False))
    there.put_slack("c-0", ReportedSlack(1.0, 0.5, 0.0))
    assert proposed(there) == []
    there.drop_worker("c")
    assert proposed(there) == plain


@pytest.mark.parametrize("barred", [1, 2, 3])
def test_a_barred_session_does_not_keep_others_from_balancing(barred: int) -> None:
    there = cluster({"a": [3.0] * 6, "b": [], "c": [3.0] * 4}, linear(0.1))
    for index in range(6):
        left = "b" if index < barred else "c"
        there.put_session(replace(there.sessions[f"a-{index}"], left={left: 1}))
    moved = proposed(there)
    assert [one.kind for one in moved] == [MigrationKind.BALANCE, MigrationKind.BALANCE, MigrationKind.SPREAD]
    assert [(one.session, one.target) for one in moved] == [(f"a-{barred + n}", "b") for n in range(3)]


def test_a_barred_session_does_not_keep_others_from_spreading() -> None:
    # Three workers share the bottleneck, and only one slot is free on `b`.
    full = {name: [3.0] * 3 for name in ("a", "c", "d")}
    there = cluster({**full, "b": [3.0]}, linear(0.1))
    there.put_worker(replace(there.workers["b"], capacity=2))
    for name in full:
        for index in range(3):
            left = "b" if index < 2 else "c" if name != "c" else "d"
            there.put_session(replace(there.sessions[f"{name}-{index}"], left={left: 1}))
    [one] = proposed(there)
    assert (one.kind, one.target, one.session) == (MigrationKind.SPREAD, "b", "a-2")
