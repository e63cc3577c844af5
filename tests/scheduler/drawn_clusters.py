"""Drawn clusters, and what every proposal of a rebalancer must keep on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import event, settings
from hypothesis import strategies as st

from turboserve.scheduler.placement import (
    Cluster,
    Demand,
    Migration,
    MigrationKind,
    Rebalancer,
    SessionState,
    WorkerState,
)

EXAMPLES = 12 if settings().derandomize else 300
"""Number of examples: few and fixed for a commit, many if new ones are drawn, as in `make soak`."""
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
        changed_outside=draw(st.integers(0, 2)),
        floor_capacity=draw(st.sampled_from((0, 2, 5, 8))),
        absorbs=draw(st.booleans()),
        floor_chunk_latency_s=draw(profiles()),
        lends=draw(rarely),
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
        left=draw(st.dictionaries(st.sampled_from(WORKERS), st.integers(1, 3), max_size=2)),
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


def kept_promises(cluster: Cluster, migrations: list[Migration], now: float) -> Iterator[Migration]:
    """Check what every rebalancer promises, and yield the migrations. The caller begins each of them."""
    held = {name: entry.held for name, entry in cluster.entries.items()}
    assert len({migration.session for migration in migrations}) == len(migrations)
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
        if migration.kind is not MigrationKind.DRAIN:
            assert migration.gain_s > 0 or migration.kind is MigrationKind.RESCUE
            assert session.rests_until <= now
            assert not session.suspended
        yield migration
    for name, entry in cluster.entries.items():
        # All migrations may be under way at once, counted at both ends.
        assert entry.held <= max(entry.slots, held[name])


def rounds(cluster: Cluster, rebalancer: Rebalancer, now: float, step_s: float) -> Iterator[list[Migration]]:
    """Yield the proposals of each round, and carry them out. They must end."""
    for round_ in range(100):
        migrations = rebalancer.propose(cluster, now + round_ * step_s)
        if not migrations:
            return
        for migration in migrations:
            begin(cluster, migration)
        for migration in migrations:
            finish(cluster, migration)
        yield migrations
    raise AssertionError("it never came to rest")
