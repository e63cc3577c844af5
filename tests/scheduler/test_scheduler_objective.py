"""The objective of all migrations by example: what saves late chunks, and what does not."""

from __future__ import annotations

from itertools import pairwise

from tests.scheduler.test_scheduler_slack import HORIZON_S, cluster, proposed
from turboserve.scheduler.placement import Migration, MigrationKind
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
