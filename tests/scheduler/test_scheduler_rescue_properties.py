"""Properties of every rebalancing that knows slacks, for any cluster."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.scheduler.test_scheduler_placement_properties import (
    EXAMPLES,
    SESSIONS,
    begin,
    changed,
    changes,
    demands,
    finish,
    fresh,
    kind_of,
)
from turboserve.contracts.fidelity import Tier
from turboserve.scheduler.placement import (
    Cluster,
    Demand,
    Migration,
    MigrationKind,
    MinMax,
    MinMaxRebalancer,
    ReportedSlack,
    SessionState,
    Weights,
    WorkerState,
)

HORIZON_S = 5.0
REST_S = 30.0
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
    held = {name: entry.held for name, entry in cluster.entries.items()}
    kinds = {kind_of(state) for state in cluster.workers.values()}
    under_way = dict.fromkeys(kinds, 0)
    for entry in cluster.entries.values():
        if not entry.state.draining and kind_of(entry.state) in under_way:
            under_way[kind_of(entry.state)] += len(entry.going)
    migrations = rescuing(migrations_at_once=at_once).propose(cluster, NOW)
    assert cluster.sessions == untouched
    assert len({migration.session for migration in migrations}) == len(migrations)
    order = [migration.kind is not MigrationKind.DRAIN for migration in migrations]
    active = [not cluster.sessions[migration.session].suspended for migration in migrations]
    assert [o for o, a in zip(order, active, strict=True) if a] == sorted(
        o for o, a in zip(order, active, strict=True) if a
    )
    begun = dict.fromkeys(kinds, 0)
    for migration in migrations:
        event(migration.kind.value)
        session = cluster.sessions[migration.session]
        source, target = cluster.entries[migration.source], cluster.entries[migration.target]
        assert session.worker == migration.source
        assert session.movable
        assert session.target is None
        assert target.serves
        assert kind_of(target.state) == kind_of(source.state)
        assert target.id not in session.excluded
        assert (migration.kind is MigrationKind.DRAIN) == source.state.draining
        if migration.kind is not MigrationKind.DRAIN:
            assert session.rests_until <= NOW
            assert not session.suspended
            begun[kind_of(source.state)] += 1
        if migration.kind is MigrationKind.RESCUE:
            # With the migrations before it, this one saves what it promises.
            before = late(cluster)
            begin(cluster, migration)
            promised = migration.numbers["late_chunks"] - migration.numbers["late_chunks_after"]
            assert promised >= 1
            assert late(cluster) <= before - 1
        elif migration.kind is MigrationKind.DRAIN:
            begin(cluster, migration)
        else:
            before = late(cluster)
            begin(cluster, migration)
            together = migration.kind is MigrationKind.BALANCE
            assert late(cluster) <= before or together
    for name, entry in cluster.entries.items():
        assert entry.held <= max(entry.slots, held[name])
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
    rebalancer = rescuing(migrations_at_once=at_once)
    for _ in range(100):
        before = late(cluster)
        migrations = rebalancer.propose(cluster, NOW)
        drains = any(migration.kind is MigrationKind.DRAIN for migration in migrations)
        for migration in migrations:
            begin(cluster, migration)
        for migration in migrations:
            finish(cluster, migration)
        if not migrations:
            return
        if not drains:
            rescued = any(migration.kind is MigrationKind.RESCUE for migration in migrations)
            assert late(cluster) <= before - rescued
    raise AssertionError("it never came to rest")


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


# Dynamics: workers generate, viewers play


class Playing:
    """Workers that generate in turns and viewers that play, second by second, with the rebalancer between."""

    def __init__(self, loads: list[int], chunk_s: float, pause_s: float = 0.0) -> None:
        """`pause_s`: slack that a migration costs the session."""
        self.cluster = Cluster()
        self.slacks: dict[str, float] = {}
        self.chunk_s = chunk_s
        self.pause_s = pause_s
        self.migrated = 0
        self.late = 0
        for number, load in enumerate(loads):
            profile = {n: chunk_s * n for n in range(1, 13)}
            self.cluster.put_worker(WorkerState(f"w{number}", "m", 12, chunk_latency_s=profile))
            for index in range(load):
                self.add(f"w{number}-{index}", f"w{number}", 1.0)

    def add(self, name: str, worker: str, slack_s: float) -> None:
        self.cluster.put_session(SessionState(name, "m", worker))
        self.slacks[name] = slack_s

    def second(self, now: float, rebalancer: MinMaxRebalancer) -> None:
        for entry in list(self.cluster.entries.values()):
            budget_s = 1.0
            played = dict.fromkeys(entry.here, 0.0)
            while budget_s >= self.chunk_s and entry.here:
                name = min(entry.here, key=lambda name: (self.slacks[name], name))
                if self.slacks[name] > 3.0:
                    break
                budget_s -= self.chunk_s
                self.slacks[name] += 0.75
            for name in played:
                self.slacks[name] -= 1.0
                if self.slacks[name] < 0:
                    self.late += 1
                    self.slacks[name] = 0.0
                slack_s = self.slacks[name]
                report = ReportedSlack(slack_s, slack_s - self.chunk_s, now)
                self.cluster.put_slack(name, report)
        for migration in rebalancer.propose(self.cluster, now):
            self.migrated += 1
            self.slacks[migration.session] -= self.pause_s
            finish(self.cluster, migration, rests_until=now + REST_S)


@given(st.lists(st.integers(0, 6), min_size=2, max_size=5))
@settings(max_examples=EXAMPLES // 3, deadline=None)
def test_with_a_load_that_fits_migrations_end_and_no_chunk_is_late_any_more(loads: list[int]) -> None:
    # Every worker keeps up with five sessions; so all together fit.
    playing = Playing(loads, 0.14)
    rebalancer = rescuing()
    if sum(loads) > 4 * len(loads):
        return
    for now in range(60):
        playing.second(float(now), rebalancer)
    settled, missed = playing.migrated, playing.late
    for now in range(60, 240):
        playing.second(float(now), rebalancer)
    assert playing.migrated == settled
    assert playing.late == missed


def test_migrations_that_cost_slack_do_not_cause_each_other() -> None:
    # Two sessions fill a worker, so that lost slack hardly returns. The worker with one session is relaxed,
    # and each migration makes another one so.
    playing = Playing([2, 2, 1], 0.34, pause_s=2.0)
    for now in range(300):
        playing.second(float(now), rescuing())
    assert 1 <= playing.migrated <= 3 * 300 / REST_S


def test_sessions_without_slack_leave_for_relaxed_workers_and_fewer_chunks_are_late() -> None:
    def outcome(rebalancer: MinMaxRebalancer) -> tuple[int, int]:
        playing = Playing([5, 5, 4, 4], 0.14)
        # All viewers of one worker switch their prompts: their slack is used up.
        for now in range(40):
            if now == 10:
                for index in range(5):
                    playing.slacks[f"w0-{index}"] = 0.0
            playing.second(float(now), rebalancer)
        return playing.late, playing.migrated

    (plain, none), (rescued, some) = outcome(MinMaxRebalancer()), outcome(rescuing())
    assert none == 0
    assert some >= 1
    assert rescued < plain


def test_a_session_is_rescued_once_within_its_rest() -> None:
    cluster = Cluster()
    for name in "ab":
        cluster.put_worker(WorkerState(name, "m", 6, chunk_latency_s={n: 0.3 * n for n in range(1, 7)}))
    for index in range(2):
        cluster.put_session(SessionState(f"s{index}", "m", "a"))
        cluster.put_slack(f"s{index}", ReportedSlack(0.35, 0.05, 0.0))
    [migration] = rescuing().propose(cluster, 0.0)
    finish(cluster, migration, rests_until=30.0)
    # Now the target is poor, because another session comes. It gives none away while the first one rests.
    cluster.put_session(SessionState("t", "m", "b"))
    cluster.put_slack("t", ReportedSlack(0.35, 0.05, 0.0))
    other = next(name for name in ("s0", "s1") if name != migration.session)
    cluster.drop_session(other)
    kinds = {one.kind for one in rescuing().propose(cluster, 1.0)}
    assert MigrationKind.RESCUE not in kinds
    [migration] = rescuing().propose(cluster, 30.0)
    assert migration.kind is MigrationKind.RESCUE
