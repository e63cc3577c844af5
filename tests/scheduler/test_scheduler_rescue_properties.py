"""Properties of every rebalancing that knows slacks, for any cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.drawn_clusters import (
    EXAMPLES,
    SESSIONS,
    begin,
    changed,
    changes,
    demands,
    fresh,
    kept_promises,
    kind_of,
    rounds,
)
from tests.scheduler.recorded_clusters import decisions
from turboserve.contracts.fidelity import Tier
from turboserve.scheduler.placement import (
    Cluster,
    Demand,
    Migration,
    MigrationKind,
    MinMax,
    MinMaxRebalancer,
    ReportedSlack,
    Weights,
)

DATA = Path(__file__).resolve().parents[1] / "data"
HORIZON_S = 5.0
NOW = 1.0


@st.composite
def reported(draw: st.DrawFn) -> ReportedSlack:
    slack_s = draw(st.sampled_from((-1.0, 0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0)))
    work_s = draw(st.sampled_from((0.05, 0.2, 1.0)))
    playing = draw(st.integers(0, 5)) > 0
    return ReportedSlack(
        slack_s, slack_s - work_s, draw(st.sampled_from((0.0, 0.5, 1.0))), Tier.NORMAL, playing
    )


slacks = st.dictionaries(st.sampled_from(SESSIONS), reported())


def with_slacks(deltas: list[tuple[str, object]], known: dict[str, ReportedSlack]) -> Cluster:
    cluster = changed(deltas)
    for name, slack in known.items():
        cluster.put_slack(name, slack)
    return cluster


def rescuing(migrations_at_once: int = 8) -> MinMaxRebalancer:
    weights = Weights(rescue_horizon_s=HORIZON_S, migrations_at_once=migrations_at_once)
    return MinMaxRebalancer(weights)


def late(cluster: Cluster, now: float = NOW) -> int:
    """Count the expected late chunks of workers that take part."""
    workers = (e for e in cluster.entries.values() if e.serves and cluster.urgency.known(e))
    return sum(cluster.urgency.late(entry, now, HORIZON_S) for entry in workers)


@given(changes(), demands())
@settings(max_examples=EXAMPLES, deadline=None)
def test_without_slack_all_decisions_are_as_before(
    deltas: list[tuple[str, object]], wanted: list[Demand]
) -> None:
    cluster = changed(deltas)
    assert rescuing().propose(cluster, NOW) == MinMaxRebalancer().propose(changed(deltas), NOW)
    assert MinMax(rescuing()).assign(cluster, wanted) == MinMax(MinMaxRebalancer()).assign(cluster, wanted)


@given(changes(), slacks)
@settings(max_examples=EXAMPLES, deadline=None)
def test_without_a_horizon_all_decisions_are_as_before(
    deltas: list[tuple[str, object]], known: dict[str, ReportedSlack]
) -> None:
    with_them = MinMaxRebalancer().propose(with_slacks(deltas, known), NOW)
    assert with_them == MinMaxRebalancer().propose(changed(deltas), NOW)


@given(changes(), slacks, st.integers(1, 8))
@settings(max_examples=EXAMPLES, deadline=None)
def test_migrations_with_slack_keep_their_promises(
    deltas: list[tuple[str, object]], known: dict[str, ReportedSlack], at_once: int
) -> None:
    cluster = with_slacks(deltas, known)
    untouched = dict(cluster.sessions)
    kinds = {kind_of(state) for state in cluster.workers.values()}
    under_way = dict.fromkeys(kinds, 0)
    reporting = set()
    for entry in cluster.entries.values():
        if cluster.urgency.slacks.keys() & (entry.here | entry.coming):
            reporting.add(kind_of(entry.state))
        for session in map(cluster.sessions.__getitem__, entry.going):
            # A drawn worker may have changed its weights since. The migration counts for the session's own.
            kind = session.model, session.weights_digest
            if kind in under_way and entry.id not in cluster.pool(*kind).draining:
                under_way[kind] += 1
    migrations = rescuing(migrations_at_once=at_once).propose(cluster, NOW)
    assert cluster.sessions == untouched
    active = [one for one in migrations if not cluster.sessions[one.session].suspended]
    order = [migration.kind is not MigrationKind.DRAIN for migration in active]
    assert order == sorted(order)
    begun = dict.fromkeys(kinds, 0)
    for migration in kept_promises(cluster, migrations, NOW):
        before = late(cluster)
        source, target = (cluster.entries[name].state for name in (migration.source, migration.target))
        begin(cluster, migration)
        if migration.kind is MigrationKind.DRAIN:
            continue
        begun[kind_of(source)] += 1
        left = cluster.sessions[migration.session].left.get(target.id, 0)
        assert left <= max(source.changed_outside, target.changed_outside) or kind_of(source) not in reporting
        if migration.kind is MigrationKind.RESCUE:
            # With the migrations before it, this one saves what it promises.
            promised = migration.numbers["late_chunks"] - migration.numbers["late_chunks_after"]
            assert promised >= 1
            assert late(cluster) <= before - 1
        else:
            together = migration.kind is MigrationKind.BALANCE
            assert late(cluster) <= before or together
    for kind, count in begun.items():
        assert count <= max(0, at_once - under_way[kind])


@given(changes(), slacks)
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_drain_finds_the_room_that_it_finds_without_slack(
    deltas: list[tuple[str, object]], known: dict[str, ReportedSlack]
) -> None:
    def drained(migrations: list[Migration]) -> set[str]:
        return {migration.session for migration in migrations if migration.kind is MigrationKind.DRAIN}

    cluster = with_slacks(deltas, known)
    assert drained(rescuing().propose(cluster, NOW)) == drained(MinMaxRebalancer().propose(cluster, NOW))


@given(changes(), slacks, st.integers(1, 8))
@settings(max_examples=EXAMPLES, deadline=None)
def test_under_constant_slacks_migrations_end_and_late_chunks_never_grow(
    deltas: list[tuple[str, object]], known: dict[str, ReportedSlack], at_once: int
) -> None:
    cluster = with_slacks(deltas, known)
    before = late(cluster)
    for migrations in rounds(cluster, rescuing(migrations_at_once=at_once), NOW, 0.0):
        if all(migration.kind is not MigrationKind.DRAIN for migration in migrations):
            rescued = any(migration.kind is MigrationKind.RESCUE for migration in migrations)
            assert late(cluster) <= before - rescued
        before = late(cluster)


@given(changes(), slacks, slacks)
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_index_of_slacks_depends_on_the_cluster_alone(
    deltas: list[tuple[str, object]], first: dict[str, ReportedSlack], then: dict[str, ReportedSlack]
) -> None:
    cluster = with_slacks(deltas, first)
    rescuing().propose(cluster, NOW)
    for name in SESSIONS:
        cluster.put_slack(name, then.get(name))
    other = fresh(cluster)
    for name, slack in then.items():
        other.put_slack(name, slack)
    assert cluster.urgency.slacks == other.urgency.slacks
    assert rescuing().propose(cluster, NOW) == rescuing().propose(other, NOW)
    for kind in cluster.pools.keys() | other.pools.keys():
        for ranking in ("late", "relaxed"):
            mine, its = (getattr(one.pool(*kind), ranking).items for one in (cluster, other))
            if cluster.urgency.slacks:
                assert mine == its


def test_without_slack_the_planner_decides_as_before_the_common_objective() -> None:
    # Recorded on commit 409399e6 with `recorded_clusters.decisions`.
    recorded = json.loads((DATA / "plain_rebalancing.json").read_text())
    assert decisions() == recorded
    assert {one[3] for decided in recorded for one in decided} == {"balance", "spread", "drain"}


@given(changes())
@settings(max_examples=EXAMPLES, deadline=None)
def test_without_slack_sessions_may_return(deltas: list[tuple[str, object]]) -> None:
    cluster = changed(deltas)
    with_memory = rescuing().propose(cluster, NOW)
    for session in list(cluster.sessions.values()):
        cluster.put_session(replace(session, left={}))
    assert MinMaxRebalancer().propose(cluster, NOW) == with_memory
