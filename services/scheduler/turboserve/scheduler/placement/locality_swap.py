"""Exchanges the workers of new sessions with migration targets, so that migrations have nearer targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.demands import Choice, Demand
from turboserve.scheduler.placement.links import LinkKind, kind_between
from turboserve.scheduler.placement.migrations import Migration, Rebalancer
from turboserve.scheduler.placement.states import SessionState

_NEARNESS = list(LinkKind)


def swap_for_locality(
    cluster: Cluster, demands: Sequence[Demand], choices: Sequence[Choice], rebalancer: Rebalancer
) -> list[Choice]:
    """Return `choices`, some of them exchanged with the target of an expected migration.

    A new session costs the same on any host, but a migration costs less on a near one. If a new session's
    worker is nearer to a migration's source than the migration's target is, the new session goes to that
    target instead. The number of sessions on each worker does not change, so L′ does not either, and the
    migration becomes cheaper when it is decided.
    """
    before = {d.session: cluster.sessions.get(d.session) for d in demands}
    _try_out(cluster, demands, choices, before)
    migrations = rebalancer.propose(cluster, inf)
    after = _exchanged(cluster, demands, choices, migrations) if migrations else list(choices)
    for name, state in before.items():
        if state is None:
            cluster.drop_session(name)
        else:
            cluster.put_session(state)
    return after


def _try_out(
    cluster: Cluster,
    demands: Sequence[Demand],
    choices: Sequence[Choice],
    before: dict[str, SessionState | None],
) -> None:
    for demand, choice in zip(demands, choices, strict=True):
        if choice.worker is not None:
            state = before[demand.session] or SessionState(demand.session, demand.model)
            cluster.put_session(replace(state, reserved=choice.worker, movable=False))


def _exchanged(
    cluster: Cluster, demands: Sequence[Demand], choices: Sequence[Choice], migrations: Sequence[Migration]
) -> list[Choice]:
    found = list(choices)
    open_ = [
        i
        for i, (demand, choice) in enumerate(zip(demands, choices, strict=True))
        if choice.worker is not None and demand.counted_on is None and demand.holder != choice.worker
    ]
    for migration in sorted(migrations, key=lambda migration: (-migration.cost_s, migration.session)):
        session = cluster.sessions[migration.session]
        if session.suspended:
            continue
        far = _nearness(cluster, migration.source, migration.target)
        nearer = [
            (_nearness(cluster, migration.source, str(found[i].worker)), i)
            for i in open_
            if _same_pool(cluster, str(found[i].worker), migration.target)
            and found[i].worker not in session.excluded
            and cluster.entries[str(found[i].worker)].serves
            and migration.target not in demands[i].excluded
        ]
        best, i = min(nearer, default=(far, -1))
        if best < far:
            found[i] = _at(cluster, found[i], migration)
            open_.remove(i)
    return found


def _same_pool(cluster: Cluster, one: str, other: str) -> bool:
    """Whether sessions can migrate between two workers, because both have the same model and weights."""
    first, second = (cluster.entries[name].state for name in (one, other))
    return (first.model, first.weights_digest) == (second.model, second.weights_digest)


def _nearness(cluster: Cluster, source: str, worker: str) -> int:
    hosts = (cluster.entries[name].state.host for name in (source, worker))
    return _NEARNESS.index(kind_between(*hosts))


def _at(cluster: Cluster, choice: Choice, migration: Migration) -> Choice:
    entry = cluster.entries[migration.target]
    latency_s = entry.curve(entry.held + 1)
    numbers = {
        **choice.numbers,
        "latency_s": latency_s,
        "bottleneck_after_s": max(choice.numbers["bottleneck_before_s"], latency_s),
        "sessions": entry.held + 1,
        "capacity": entry.slots,
    }
    reason = f"{choice.reason}, with {choice.worker} left to a session of {migration.source}, which is nearer"
    return Choice(choice.session, migration.target, reason, numbers)
