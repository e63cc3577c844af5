"""Checks whether a world has settled: all sessions run, are suspended or have ended, no work is left."""

from __future__ import annotations

from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.simulation.users import Users
from turboserve.simulation.world import World


def unsettled(world: World, users: Users) -> str | None:
    """Return why the world has not settled; None if it has."""
    for record in world.records():
        trouble = None if record.phase.ended else _unsettled(world, users, record)
        if trouble is not None:
            return f"{record.id}: {trouble}"
    if waiting := len(world.postgres.tables.outbox.rows):
        return f"{waiting} events are not published"
    if (missing := world.checker.unlogged()) is not None:
        return missing
    if world.autoscaler is None:
        return "no autoscaler runs"
    pool = world.autoscaler.pool
    ready = sum(slot.phase is PoolMemberPhase.READY for slot in pool.members.values())
    if ready != pool.target or not pool.adopted:
        return f"{ready} of {pool.target} workers are ready"
    return None


def _unsettled(world: World, users: Users, record: SessionRecord) -> str | None:
    if record.epoch > 0 and record.own_revision is None:
        return "its fence is not in the log"
    if record.phase is Phase.MIGRATING or record.migration is not None:
        return "it is migrating"
    if record.phase is Phase.REQUESTED or record.phase is Phase.SUSPENDED:
        return _waits(world, record) if record.activity is Activity.WATCHING else None
    worker = world.worker(record.worker)
    if worker is None:
        return _waits(world, record)
    state = worker.state(record.id)
    if state is None or state.on_host or not worker.generating:
        return f"{record.worker} does not run it: {state}"
    elsewhere = [
        other.name
        for other in world.workers.values()
        if other is not worker and other.alive and other.state(record.id) is not None
    ]
    if elsewhere:
        return f"{elsewhere} also hold it"
    return _unwatched(world, users, record)


def _waits(world: World, record: SessionRecord) -> str | None:
    """Check a session without a worker: it may wait only while all slots are taken and the pool is full."""
    if world.free_slots() > 0:
        return f"it waits (last worker: {record.worker}) while slots are free"
    if world.autoscaler is None or world.autoscaler.pool.target < world.scale.most_workers:
        return "it waits while the pool can grow"
    return None


def _unwatched(world: World, users: Users, record: SessionRecord) -> str | None:
    if not any(viewer.session == record.id and users.connected(viewer) for viewer in users.viewers):
        return None
    last = world.checker.log.of(record.id).last
    made = 0 if last is None else last.header.index + 1
    if made <= world.made_when_calm.get(record.id, -1) + 1:
        return "its video does not continue"
    if record.applied_control_seq < record.control_seq:
        return "its prompt is not applied"
    return None


def held_memory(world: World) -> str | None:
    """Describe what is still held although every session has ended; None if nothing is."""
    for worker in world.workers.values():
        if not worker.alive:
            continue
        left = worker.held()
        if any(left.values()):
            return f"{worker.name} holds {left}"
    return None
