"""Properties of every assignment and every rebalancing, for any cluster."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from turboserve.experiments.placement.oracle import optimum
from turboserve.scheduler.placement import (
    PLACEMENTS,
    Assigner,
    Cluster,
    Demand,
    Links,
    Migration,
    MigrationKind,
    MinMax,
    MinMaxRebalancer,
    SessionState,
    Weights,
    WorkerState,
)

EXAMPLES = 75 if settings().derandomize else 300
"""Number of examples: few and fixed for a commit, many if new ones are drawn."""
MODELS = ("big", "toy")
WORKERS = tuple(f"w{n}" for n in range(6))
SESSIONS = tuple(f"s{n:02}" for n in range(24))
BIG = {"w4", "w5", "s20", "s21", "s22", "s23"}
"""Workers and sessions of the other model. A session is only ever on a worker of its own model."""
GB = 10**9
Kind = tuple[str, str | None]
"""Model and weights: sessions migrate between workers of one kind."""

weights_digests = st.sampled_from((None, None, "a", "b"))

rates = st.sampled_from((0.05, 0.1, 0.1003, 0.2))


@st.composite
def profiles(draw: st.DrawFn) -> dict[int, float]:
    """Draw a linear profile with a part that batching saves; sometimes an empty profile."""
    if draw(st.integers(0, 9)) == 0:
        return {}
    fixed, rate = draw(st.sampled_from((0.0, 0.05, 0.3))), draw(rates)
    return {n: fixed + rate * n for n in range(1, draw(st.integers(1, 6)))}


def model_of(name: str) -> str:
    return MODELS[0] if name in BIG else MODELS[1]


@st.composite
def worker_states(draw: st.DrawFn, name: str) -> WorkerState:
    rarely = st.integers(0, 7).map(lambda n: n == 0)
    return WorkerState(
        id=name,
        model=model_of(name),
        capacity=draw(st.integers(0, 5)),
        weights_digest=draw(weights_digests),
        ready=not draw(rarely),
        draining=draw(rarely),
        suspect=draw(rarely),
        chunk_latency_s=draw(profiles()),
        host=draw(st.sampled_from(("", "n/1", "n/2", "m/1"))),
        floor_capacity=draw(st.sampled_from((0, 2, 5, 8))),
        absorbs=draw(st.booleans()),
        floor_chunk_latency_s=draw(profiles()),
    )


@st.composite
def session_states(draw: st.DrawFn, name: str) -> SessionState:
    place = st.sampled_from((None, *(w for w in WORKERS if model_of(w) == model_of(name))))
    suspended = draw(st.integers(0, 5)) == 0
    worker = draw(place)
    target = draw(place) if worker is not None and draw(st.integers(0, 7)) == 0 else None
    return SessionState(
        id=name,
        model=model_of(name),
        worker=worker,
        suspended=suspended,
        target=target,
        reserved=draw(place) if target is None and draw(st.integers(0, 5)) == 0 else None,
        state_bytes=draw(st.sampled_from((0, GB, 4 * GB))),
        movable=target is None and draw(st.integers(0, 7)) > 0,
        rests_until=draw(st.sampled_from((0.0, 0.0, 0.0, 5.0))),
        weights_digest=draw(weights_digests),
        excluded=frozenset(draw(st.lists(st.sampled_from(WORKERS), max_size=1))),
    )


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, object]]:
    """Draw changes to a cluster: put and drop, in any order, also of absent entries."""
    made: list[tuple[str, object]] = []
    for _ in range(draw(st.integers(0, 40))):
        match draw(st.integers(0, 9)):
            case 0 | 1 | 2:
                made.append(("put_worker", draw(worker_states(draw(st.sampled_from(WORKERS))))))
            case 3:
                made.append(("drop_worker", draw(st.sampled_from(WORKERS))))
            case 4:
                made.append(("drop_session", draw(st.sampled_from(SESSIONS))))
            case _:
                made.append(("put_session", draw(session_states(draw(st.sampled_from(SESSIONS))))))
    return made


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    return [
        Demand(
            session=f"d{n}",
            model=MODELS[1] if draw(st.integers(0, 4)) else MODELS[0],
            kind="place",
            holder=draw(st.one_of(st.none(), st.sampled_from(WORKERS))),
            excluded=frozenset(draw(st.lists(st.sampled_from(WORKERS), max_size=2))),
            weights_digest=draw(weights_digests),
        )
        for n in range(draw(st.integers(0, 8)))
    ]


def changed(deltas: list[tuple[str, object]], target_chunk_s: float | None = None) -> Cluster:
    cluster = Cluster(target_chunk_s=target_chunk_s)
    for name, argument in deltas:
        getattr(cluster, name)(argument)
    return cluster


def fresh(cluster: Cluster) -> Cluster:
    """Build an equal cluster from scratch."""
    sessions = sorted(cluster.sessions.values(), key=lambda session: session.id, reverse=True)
    return Cluster(cluster.workers.values(), sessions, cluster.target_chunk_s)


def refused(cluster: Cluster) -> list[Demand]:
    """Return demands of sessions whose worker refused them: they hold its slot and want another."""
    return [
        Demand(s.id, s.model, "place", counted_on=s.worker, excluded=s.excluded)
        for s in sorted(cluster.sessions.values(), key=lambda s: s.id)
        if not s.suspended and s.worker is not None and s.target is None and s.reserved is None
    ][:3]


targets_s = st.sampled_from((None, 0.25, 0.5))


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


def begin(cluster: Cluster, migration: Migration) -> None:
    cluster.put_session(replace(cluster.sessions[migration.session], target=migration.target))


def finish(cluster: Cluster, migration: Migration, rests_until: float = 0.0) -> None:
    session = replace(cluster.sessions[migration.session], worker=migration.target, target=None)
    cluster.put_session(replace(session, rests_until=rests_until))


def kind_of(state: WorkerState) -> Kind:
    return state.model, state.weights_digest


def levels(cluster: Cluster) -> dict[Kind, list[float]]:
    """Return, per kind, the chunk latencies of workers that serve, the worst first."""
    found: dict[Kind, list[float]] = {kind_of(worker): [] for worker in cluster.workers.values()}
    for entry in cluster.entries.values():
        if entry.serves:
            found[kind_of(entry.state)].append(entry.curve(entry.staying))
    return {kind: sorted(values, reverse=True) for kind, values in found.items()}


@given(changes(), targets_s, st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_migrations_keep_their_promises(
    deltas: list[tuple[str, object]], target_s: float | None, spreads: bool
) -> None:
    cluster = changed(deltas, target_s)
    before = levels(cluster)
    held = {name: entry.held for name, entry in cluster.entries.items()}
    migrations = MinMaxRebalancer(Weights(spreads=spreads)).propose(cluster, 1.0)
    assert len({migration.session for migration in migrations}) == len(migrations)
    drained = dict.fromkeys(before, False)
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
        assert not source.state.suspect
        assert (migration.kind is MigrationKind.DRAIN) == source.state.draining
        if migration.kind is MigrationKind.DRAIN:
            drained[kind_of(source.state)] = True
        else:
            assert migration.gain_s > 0
            assert session.rests_until <= 1.0
            assert not session.suspended
        begin(cluster, migration)
    for name, entry in cluster.entries.items():
        # All migrations may be under way at once, counted at both ends.
        assert entry.held <= max(entry.slots, held[name])
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
    rebalancer = MinMaxRebalancer(Weights(migrations_at_once=at_once))
    been: dict[str, set[str]] = {}
    for round_ in range(60):
        migrations = rebalancer.propose(cluster, float(round_))
        for migration in migrations:
            begin(cluster, migration)
        for migration in migrations:
            visited = been.setdefault(migration.session, {migration.source})
            assert migration.target not in visited
            visited.add(migration.target)
            finish(cluster, migration)
        if not migrations:
            return
    raise AssertionError("it never came to rest")


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
