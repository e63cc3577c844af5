"""Rebalancing by example: which sessions migrate, which do not, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from turboserve.scheduler.placement import (
    Cluster,
    Demand,
    Link,
    LinkKind,
    Links,
    Migration,
    MigrationKind,
    MinMax,
    MinMaxRebalancer,
    SessionState,
    Weights,
    WorkerState,
)
from turboserve.scheduler.placement.links import kind_between
from turboserve.scheduler.placement.plan import Planner
from turboserve.scheduler.placement.pool import Pool

LINEAR = {n: 0.1 * n for n in range(1, 9)}


def cluster(loads: dict[str, int], **changes: Mapping[str, object]) -> Cluster:
    """Build workers with the given numbers of sessions, L(n) = 0.1 n, K = 5; `changes` by worker."""
    made = Cluster()
    for name, load in loads.items():
        state = WorkerState(name, "toy", 5, chunk_latency_s=LINEAR, host=name)
        made.put_worker(replace(state, **changes.get(name, {})))  # type: ignore[arg-type]
        for index in range(load):
            made.put_session(SessionState(f"{name}-{index}", "toy", name))
    return made


def proposed(there: Cluster, now: float = 0.0, **weights: object) -> list[Migration]:
    return MinMaxRebalancer(Weights(**weights)).propose(there, now)  # type: ignore[arg-type]


def test_migrates_from_the_bottleneck_to_where_latency_is_least() -> None:
    [migration] = proposed(cluster({"a": 4, "b": 3, "c": 1}))
    assert (migration.source, migration.target, migration.kind) == ("a", "c", MigrationKind.BALANCE)
    assert migration.gain_s == pytest.approx(0.1 - 0.1 * 0.023)
    assert migration.cost_s == pytest.approx(0.023)
    assert migration.numbers["bottleneck_before_s"] == pytest.approx(0.4)
    assert migration.numbers["bottleneck_after_s"] == pytest.approx(0.3)


def test_workers_that_are_the_bottleneck_together_are_relieved_together() -> None:
    migrations = proposed(cluster({"a": 4, "b": 4, "c": 2, "d": 1}))
    assert {migration.source for migration in migrations} == {"a", "b"}
    assert {migration.target for migration in migrations} == {"c", "d"}
    assert all(migration.gain_s == pytest.approx((0.1 - 0.1 * 2 * 0.023) / 2) for migration in migrations)


def test_nothing_migrates_where_nothing_gains() -> None:
    assert proposed(cluster({"a": 3, "b": 3, "c": 2})) == []


def test_a_migration_that_costs_more_than_it_gains_is_not_made() -> None:
    assert proposed(cluster({"a": 4, "b": 1}), eta=5.0) == []


def test_noise_of_the_profiles_migrates_nothing() -> None:
    slower = {"a": {"chunk_latency_s": {n: 0.1004 * n for n in range(1, 6)}}}
    assert proposed(cluster({"a": 3, "b": 2}, **slower)) == []


def test_fast_workers_take_more() -> None:
    fast = {"b": {"chunk_latency_s": {n: 0.05 * n for n in range(1, 6)}}}
    there = cluster({"a": 4, "b": 2}, **fast)
    for migration in proposed(there):
        there.put_session(replace(there.sessions[migration.session], worker=migration.target))
    assert (there.entries["a"].held, there.entries["b"].held) == (2, 4)


def test_the_nearest_of_equal_targets_is_taken() -> None:
    links = Links({LinkKind.NODE: Link(0.01, 1e9), LinkKind.ACROSS: Link(0.02, 1e9)})
    there = cluster({"a": 3, "b": 0, "c": 0}, a={"host": "n/1"}, b={"host": "m/1"}, c={"host": "n/2"})
    migrations = MinMaxRebalancer(links=links).propose(there, 0.0)
    assert migrations[0].target == "c"
    assert migrations[0].cost_s == pytest.approx(0.01)


def test_the_smallest_state_is_migrated() -> None:
    there = cluster({"a": 3, "b": 1})
    for index, size in enumerate((3, 1, 2)):
        there.put_session(SessionState(f"a-{index}", "toy", "a", state_bytes=size * 10**9))
    [migration] = proposed(there)
    assert migration.session == "a-1"


def test_a_session_that_rests_stays_until_it_has_rested() -> None:
    there = cluster({"a": 2, "b": 0})
    for index in range(2):
        there.put_session(SessionState(f"a-{index}", "toy", "a", rests_until=10.0))
    assert proposed(there, now=9.9) == []
    assert len(proposed(there, now=10.0)) == 1


def test_migrations_under_way_count_at_both_ends_and_are_not_proposed_again() -> None:
    there = cluster({"a": 3, "b": 0})
    [migration] = proposed(there)
    there.put_session(replace(there.sessions[migration.session], target=migration.target))
    assert there.entries["a"].held == 3
    assert there.entries["b"].held == 1
    assert proposed(there) == []


def test_no_more_migrations_at_once_than_allowed() -> None:
    there = cluster({"a": 5, "b": 5, "c": 5, "d": 0, "e": 0, "f": 0})
    first = proposed(there, migrations_at_once=4)
    assert len(first) == 4
    for migration in first[:3]:
        there.put_session(replace(there.sessions[migration.session], target=migration.target))
    assert len(proposed(there, migrations_at_once=4)) == 1


def test_a_new_worker_is_put_to_use_even_if_the_bottleneck_stays() -> None:
    there = cluster({**{f"w{n}": 4 for n in range(8)}, "x": 0})
    migrations = proposed(there)
    assert {migration.kind for migration in migrations} == {MigrationKind.SPREAD}
    assert {migration.target for migration in migrations} == {"x"}
    # Never slower than the worker that gave a session away.
    assert len(migrations) == 3
    assert len({migration.source for migration in migrations}) == 3
    assert proposed(there, spreads=False) == []


def test_nothing_goes_to_a_worker_that_is_slower_still() -> None:
    slow = {"a": {"chunk_latency_s": {1: 0.9}}}
    fast = {"b": {"chunk_latency_s": {1: 1.0}}}
    assert proposed(cluster({"a": 1, "b": 0}, **slow, **fast)) == []


def test_a_draining_worker_is_emptied_at_any_cost() -> None:
    there = cluster({"a": 2, "b": 4, "c": 4}, a={"draining": True, "ready": False})
    there.put_session(SessionState("a-0", "toy", "a", rests_until=1e9))
    there.put_session(SessionState("a-s", "toy", "a", suspended=True))
    migrations = proposed(there, migrations_at_once=0)
    assert {(migration.session, migration.kind) for migration in migrations} == {
        (name, MigrationKind.DRAIN) for name in ("a-0", "a-1", "a-s")
    }
    assert {migration.target for migration in migrations if migration.session != "a-s"} == {"b", "c"}
    assert all(migration.gain_s < 0 for migration in migrations)


def test_without_room_a_drain_waits() -> None:
    there = cluster({"a": 2, "b": 4}, a={"draining": True})
    migrations = proposed(there)
    assert [(migration.session, migration.target) for migration in migrations] == [("a-0", "b")]


def test_suspended_sessions_need_no_slot() -> None:
    there = cluster({"a": 0, "b": 5}, a={"draining": True})
    there.put_session(SessionState("s", "toy", "a", suspended=True))
    [migration] = proposed(there)
    assert (migration.session, migration.target) == ("s", "b")


def test_who_is_silent_or_refused_gets_nothing() -> None:
    assert proposed(cluster({"a": 4, "b": 0}, b={"suspect": True})) == []
    assert proposed(cluster({"a": 4, "b": 0}, a={"suspect": True})) == []
    there = cluster({"a": 2, "b": 0})
    for index in range(2):
        there.put_session(SessionState(f"a-{index}", "toy", "a", excluded=frozenset({"b"})))
    assert proposed(there) == []


def test_sessions_with_a_command_under_way_stay() -> None:
    there = cluster({"a": 2, "b": 0})
    for index in range(2):
        there.put_session(SessionState(f"a-{index}", "toy", "a", movable=False))
    assert proposed(there) == []


def test_models_do_not_mix() -> None:
    there = cluster({"a": 4, "b": 0}, b={"model": "other"})
    assert proposed(there) == []


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("n/h", "n/h", LinkKind.HOST),
        ("n/h", "n/i", LinkKind.NODE),
        ("n/h", "m/h", LinkKind.ACROSS),
        ("h", "h", LinkKind.HOST),
        ("h", "i", LinkKind.ACROSS),
        ("", "", LinkKind.ACROSS),
    ],
)
def test_how_near_two_hosts_are(one: str, other: str, kind: LinkKind) -> None:
    assert kind_between(one, other) is kind


def test_links_learn_from_migrations() -> None:
    links = Links()
    for index in range(30):
        size = (1 + index % 3) * 10**6
        links.observe(LinkKind.ACROSS, size, 0.01 + size / 1e9)
    assert links.seconds(LinkKind.ACROSS, 5 * 10**6) == pytest.approx(0.015)
    before = links.known[LinkKind.HOST].bytes_per_s
    for _ in range(30):
        links.observe(LinkKind.HOST, 10**6, 0.5)
    # Equal sizes give no information on β.
    assert links.known[LinkKind.HOST].bytes_per_s == before
    assert links.seconds(LinkKind.HOST, 10**6) == pytest.approx(0.5)
    links.observe(LinkKind.NODE, 0, 0.0)
    assert links.seconds(LinkKind.NODE, 0) == 0.0


def test_a_new_session_leaves_the_near_slot_to_one_that_migrates() -> None:
    links = Links({LinkKind.ACROSS: Link(0.5, 1e9)})
    rebalancer = MinMaxRebalancer(links=links)
    fast = {"chunk_latency_s": {n: 0.09 * n for n in range(1, 6)}, "host": "n/2"}
    there = cluster({"a": 4, "b": 1, "c": 1}, a={"host": "n/1"}, b=fast, c={"host": "m/1"})
    for name in ("b", "c"):
        there.put_worker(replace(there.workers[name], capacity=2))
    demand = Demand("new", "toy", "place")
    assert MinMax().assign(there, [demand])[0].worker == "b"
    [choice] = MinMax(rebalancer).assign(there, [demand])
    assert choice.worker == "c"
    assert "left to a session of a" in choice.reason
    there.put_session(SessionState("new", "toy", reserved="c"))
    [migration] = rebalancer.propose(there, 0.0)
    assert (migration.source, migration.target) == ("a", "b")


def test_where_no_worker_is_nearer_a_placement_plans_no_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[float] = []

    def plans(self: MinMaxRebalancer, there: Cluster, now: float) -> list[Migration]:
        planned.append(now)
        return []

    monkeypatch.setattr(MinMaxRebalancer, "propose", plans)
    demand, placement = Demand("new", "toy", "place"), MinMax(MinMaxRebalancer())
    one_host = cluster({"a": 3, "b": 1}, a={"host": "n/1"}, b={"host": "n/1"})
    assert placement.assign(one_host, [demand]) == MinMax().assign(one_host, [demand])
    assert planned == []
    placement.assign(cluster({"a": 3, "b": 1}, a={"host": "n/1"}, b={"host": "n/2"}), [demand])
    assert len(planned) == 1


def test_without_a_change_nothing_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[float] = []

    class CountedPlanner(Planner):
        def __init__(self, of: Cluster, pool: Pool, links: Links, now: float, returns: bool = True) -> None:
            planned.append(now)
            super().__init__(of, pool, links, now, returns)

    monkeypatch.setattr("turboserve.scheduler.placement.rebalance.Planner", CountedPlanner)
    there, rebalancer = cluster({"a": 3, "b": 1}), MinMaxRebalancer()
    for session in list(there.sessions.values()):
        there.put_session(replace(session, rests_until=5.0))
    assert rebalancer.propose(there, 1.0) == rebalancer.propose(there, 4.9) == []
    assert planned == [1.0]
    # The sessions have rested.
    [migration] = rebalancer.propose(there, 5.0)
    assert rebalancer.propose(there, 6.0) == [migration]
    assert planned == [1.0, 5.0]
    rebalancer.links.observe(LinkKind.ACROSS, 0, 60.0)
    assert rebalancer.propose(there, 6.0) == []
    assert planned == [1.0, 5.0, 6.0]
    there.drop_session("b-0")
    rebalancer.propose(there, 6.0)
    assert planned == [1.0, 5.0, 6.0, 6.0]
