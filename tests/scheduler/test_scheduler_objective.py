"""The objective of all migrations by example: what saves late chunks, and what does not."""

from __future__ import annotations

from tests.scheduler.test_scheduler_slack import cluster, proposed
from turboserve.scheduler.placement import Migration, MigrationKind


def rescues(migrations: list[Migration]) -> list[Migration]:
    return [one for one in migrations if one.kind is MigrationKind.RESCUE]


def linear(each_s: float) -> dict[int, float]:
    return {n: each_s * n for n in range(1, 9)}


def test_a_rescue_overloads_no_worker() -> None:
    # A worker keeps up with two sessions of 0.26 s, not with three. One chunk on `a` is late now.
    assert rescues(proposed(cluster({"a": [0.36, 0.5], "b": [3.0, 3.0]}, linear(0.26)))) == []
    [one] = rescues(proposed(cluster({"a": [0.36, 0.5], "b": [3.0]}, linear(0.26))))
    assert (one.session, one.target) == ("a-0", "b")
