"""Properties of every assignment and every rebalancing, for any cluster."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tests.scheduler.drawn_clusters import (
    EXAMPLES,
    GB,
    begin,
    changed,
    changes,
    demands,
    finish,
    fresh,
    kept_promises,
    kind_of,
    levels,
    rates,
    rounds,
)
from turboserve.experiments.placement.oracle import optimum
from turboserve.scheduler.placement import (
    PLACEMENTS,
    Assigner,
    Cluster,
    Demand,
    Links,
    MigrationKind,
    MinMax,
    MinMaxRebalancer,
    SessionState,
    Weights,
    WorkerState,
)
from turboserve.scheduler.placement.links import LinkKind


def refused(cluster: Cluster) -> list[Demand]:
    """Return demands of sessions whose worker refused them: they hold its slot and want another."""
    return [
        Demand(s.id, s.model, "place", counted_on=s.worker, excluded=s.excluded)
        for s in sorted(cluster.sessions.values(), key=lambda s: s.id)
        if not s.suspended and s.worker is not None and s.target is None and s.reserved is None
    ][:3]


targets_s = st.sampled_from((None, 0.25, 0.5))
TIMES = (1.0, 1.0, 4.9, 5.0, 6.0, inf, 1.0)
"""Before, at and after the end of some sessions' rests (`session_states`)."""


@given(changes(), demands(), targets_s)
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_index_gives_the_same_choices_as_a_look_at_everybody(
    deltas: list[tuple[str, object]], wanted: list[Demand], target_s: float | None
) -> None:
    cluster = changed(deltas, target_s)
    wanted = [*refused(cluster), *wanted]
    assert MinMax().assign(cluster, wanted) == MinMax().place(cluster.candidates(), wanted)


@given(changes(), targets_s)
@settings(max_examples=EXAMPLES, deadline=None)
def test_deltas_lead_to_the_same_index_as_building_it_at_once(
    deltas: list[tuple[str, object]], target_s: float | None
) -> None:
    cluster = changed(deltas, target_s)
    other = fresh(cluster)
    assert cluster.entries.keys() == other.entries.keys()
    for kind in cluster.pools.keys() | other.pools.keys():
        one, two = cluster.pool(*kind), other.pool(*kind)
        assert (one.ready, one.draining, one.migrating) == (two.ready, two.draining, two.migrating)
        for ranking in ("targets", "tops", "spare", "suspended_ranking"):
            assert getattr(one, ranking).items == getattr(two, ranking).items
        near = {key: ranking.items for key, ranking in one.near.items() if ranking.items}
        assert near == {key: ranking.items for key, ranking in two.near.items() if ranking.items}
    assert MinMaxRebalancer().propose(cluster, 1.0) == MinMaxRebalancer().propose(other, 1.0)


@given(changes(), targets_s)
@settings(max_examples=EXAMPLES, deadline=None)
def test_candidates_show_each_change(deltas: list[tuple[str, object]], target_s: float | None) -> None:
    cluster = Cluster(target_chunk_s=target_s)
    for name, argument in deltas:
        getattr(cluster, name)(argument)
        assert cluster.candidates() == fresh(cluster).candidates()


@given(st.lists(changes(), max_size=3), st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_rebalancer_that_remembers_its_proposals_finds_those_of_a_new_one(
    parts: list[list[tuple[str, object]]], measures: bool
) -> None:
    links = Links()
    kept, cluster = MinMaxRebalancer(links=links), Cluster()
    for number, deltas in enumerate(parts):
        for name, argument in deltas:
            getattr(cluster, name)(argument)
        for now in TIMES:
            if measures:
                links.observe(LinkKind.ACROSS, GB, 0.1 * number)
            expected = MinMaxRebalancer(links=links).propose(cluster, now)
            event("migrates" if expected else "stays")
            assert kept.propose(cluster, now) == expected


@given(changes(), demands(), st.sampled_from(PLACEMENTS.names))
@settings(max_examples=EXAMPLES, deadline=None)
def test_assignment_keeps_its_promises(
    deltas: list[tuple[str, object]], wanted: list[Demand], name: str
) -> None:
    cluster = changed(deltas)
    absorbs = name == "min-max"
    placement: Assigner = PLACEMENTS.make(name)
    choices = placement.assign(cluster, wanted)
    assert [choice.session for choice in choices] == [demand.session for demand in wanted]
    assert placement.assign(cluster, wanted) == choices or name == "round-robin"
    there = {candidate.worker: candidate for candidate in cluster.candidates()}
    loads = {worker: candidate.load for worker, candidate in there.items()}
    for demand, choice in zip(wanted, choices, strict=True):
        fitting = [
            c
            for c in there.values()
            if c.model == demand.model
            and demand.weights_digest in (None, c.weights_digest)
            and c.worker not in demand.excluded
        ]
        rooms = [c for c in fitting if loads[c.worker] < c.capacity]
        if absorbs and all(c.suspect for c in rooms):
            # Lower fidelity comes after all slots, and before workers that may be dead.
            lowered = [c for c in fitting if loads[c.worker] < c.floor_capacity and not c.suspect]
            event("a session is absorbed" if lowered else "no session is absorbed")
            rooms = lowered or rooms
        assert (choice.worker is None) == (rooms == [])
        if choice.worker is not None:
            assert choice.worker in {c.worker for c in rooms}
            assert not there[choice.worker].suspect or all(c.suspect for c in rooms)
            if name in ("min-max", "least-loaded"):
                slotted = [c for c in rooms if loads[c.worker] < c.capacity and not c.suspect]
                holders = [c.worker for c in slotted if c.worker == demand.holder]
                assert choice.worker in (holders or [choice.worker])
            loads[choice.worker] += 1


@given(changes(), targets_s, st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_migrations_keep_their_promises(
    deltas: list[tuple[str, object]], target_s: float | None, spreads: bool
) -> None:
    cluster = changed(deltas, target_s)
    before = levels(cluster)
    migrations = MinMaxRebalancer(Weights(spreads=spreads)).propose(cluster, 1.0)
    drained = dict.fromkeys(before, False)
    for migration in kept_promises(cluster, migrations, 1.0):
        if migration.kind is MigrationKind.DRAIN:
            drained[kind_of(cluster.entries[migration.source].state)] = True
        begin(cluster, migration)
    after = levels(cluster)
    for kind, latencies in after.items():
        if not drained[kind]:
            assert latencies <= before[kind]


@given(changes())
@settings(max_examples=EXAMPLES, deadline=None)
def test_what_is_to_be_emptied_is_emptied_at_once_if_there_is_room(
    deltas: list[tuple[str, object]],
) -> None:
    cluster = changed(deltas)
    for session in list(cluster.sessions.values()):
        cluster.put_session(replace(session, excluded=frozenset(), movable=session.target is None))
    migrating = {
        migration.session
        for migration in MinMaxRebalancer(Weights(migrations_at_once=0)).propose(cluster, 0.0)
    }
    for kind in {kind_of(worker) for worker in cluster.workers.values()}:
        there = [e for e in cluster.entries.values() if e.serves and kind_of(e.state) == kind]
        emptied = [
            e
            for e in cluster.entries.values()
            if e.state.draining and kind_of(e.state) == kind and not e.state.suspect
        ]
        # A session that already migrates is not migrated again, whatever its target.
        active = {s for e in emptied for s in e.here - e.going if cluster.sessions[s].target is None}
        room = sum(max(0, e.slots - e.held) for e in there)
        assert len(active & migrating) == min(len(active), room)
        parked = {
            s
            for e in emptied
            for s in e.suspended
            if cluster.sessions[s].worker == e.id and cluster.sessions[s].target is None
        }
        assert parked <= migrating or not any(e.slots for e in there)


@given(changes(), st.integers(1, 8))
@settings(max_examples=EXAMPLES, deadline=None)
def test_under_constant_load_migrations_end_and_no_session_returns(
    deltas: list[tuple[str, object]], at_once: int
) -> None:
    cluster = changed(deltas)
    been: dict[str, set[str]] = {}
    for migrations in rounds(cluster, MinMaxRebalancer(Weights(migrations_at_once=at_once)), 0.0, 1.0):
        for migration in migrations:
            visited = been.setdefault(migration.session, {migration.source})
            assert migration.target not in visited
            visited.add(migration.target)


@given(changes(), demands(), targets_s)
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_locality_swap_overfills_no_worker_and_does_not_raise_the_bottleneck(
    deltas: list[tuple[str, object]], wanted: list[Demand], target_s: float | None
) -> None:
    cluster, plain = changed(deltas, target_s), changed(deltas, target_s)
    choices = MinMax(MinMaxRebalancer()).assign(cluster, wanted)
    # Tentative changes are undone.
    assert cluster.sessions == plain.sessions
    assert cluster.candidates() == plain.candidates()
    for demand, choice, before in zip(wanted, choices, MinMax().assign(plain, wanted), strict=True):
        assert (choice.worker is None) == (before.worker is None)
        assert choice.worker not in demand.excluded
        if choice.worker is not None:
            assert cluster.entries[choice.worker].fits(demand.model, demand.weights_digest)
        event("gave way" if choice.worker != before.worker else "stayed")
        for there, chosen in ((cluster, choice), (plain, before)):
            there.put_session(SessionState(demand.session, demand.model, reserved=chosen.worker))
    for entry in cluster.entries.values():
        came = sum(choice.worker == entry.id for choice in choices)
        assert came == 0 or entry.held <= entry.limit
    for kind in cluster.pools.keys() | plain.pools.keys():
        assert cluster.pool(*kind).bottleneck_s <= plain.pool(*kind).bottleneck_s


@st.composite
def small(draw: st.DrawFn) -> tuple[list[WorkerState], list[SessionState]]:
    workers = [
        WorkerState(
            f"w{n}",
            "toy",
            draw(st.integers(1, 4)),
            chunk_latency_s={k: draw(st.sampled_from((0.0, 0.1))) + draw(rates) * k for k in (1, 2, 3, 4)},
            host=draw(st.sampled_from(("n/1", "n/2", "m/1"))),
        )
        for n in range(draw(st.integers(2, 4)))
    ]
    slots = draw(st.permutations([w.id for w in workers for _ in range(w.capacity)]))
    count = draw(st.integers(0, min(len(slots), 9)))
    sessions = [SessionState(f"s{n}", "toy", slots[n], state_bytes=GB) for n in range(count)]
    return workers, sessions


@given(small())
@settings(max_examples=EXAMPLES, deadline=None)
def test_migrations_are_near_the_best_there_is(given_: tuple[list[WorkerState], list[SessionState]]) -> None:
    workers, sessions = given_
    assume(sessions)
    eta, links = 0.1, Links()
    weights = Weights(eta=eta, least_gain=0.0, migrations_at_once=100, spreads=False)
    cluster = Cluster(workers, sessions)
    cost_s = 0.0
    for migration in MinMaxRebalancer(weights, links).propose(cluster, 0.0):
        cost_s += migration.cost_s
        finish(cluster, migration)
    objective_s = cluster.pool("toy").bottleneck_s + eta * cost_s
    best = optimum(workers, sessions, links, eta)
    # With states of one size, the cheapest plan of every limit is weighed, so none is missed.
    assert best.objective_s - 1e-9 <= objective_s <= best.objective_s + 1e-9
