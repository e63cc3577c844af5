"""One seed from beginning to end: faults, calm, the end of every session, the violations found."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np

from turboserve.autoscaler.composition_loop import CompositionLoop
from turboserve.autoscaler.control.decode_workers import are_limit
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.simulation.faults import Faults, draw
from turboserve.simulation.injector import FaultInjector
from turboserve.simulation.mechanisms import Mechanisms, with_mechanisms, without_residency
from turboserve.simulation.null_logging import quiet
from turboserve.simulation.pool_offers import draw_offers
from turboserve.simulation.roles import draw_roles, with_role_faults
from turboserve.simulation.session_classes import draw_classes
from turboserve.simulation.settings import Scale
from turboserve.simulation.tenants import with_tenants
from turboserve.simulation.users import Users
from turboserve.simulation.world import World
from turboserve.worker.settings import BEST

SETTLE_S = 60.0
"""Bound of invariant 5, in a world whose timeouts are half of the shipped ones."""
STEADY_S = 3.0
WATCHED_S = 30.0
"""Time for which the pool is watched under constant load, for one seed in `WATCH_EVERY`."""
WATCH_EVERY = 8
RESIZES = 3
"""Maximum number of changes of the pool's size in that time: what idle sessions release, and no more."""
END_S = 30.0
LOOK_S = 0.5
WORKERS = (1, 2, 3)
"""Choices for the minimum number of workers."""
GROWTH = (0, 1, 2)
"""Choices for the number of workers that the maximum adds to the minimum."""
SLOTS = (1, 2, 3)
GATEWAYS = (1, 2, 2, 3)
STORES = (1, 1, 2)


@dataclass(frozen=True)
class ScenarioOutcome:
    """Result of one seed."""

    seed: int
    violations: dict[str, int]
    messages: tuple[str, ...]
    digest: str
    events: int
    """Number of callbacks that ran."""
    settled_s: float | None
    """Virtual time from the last fault until everything ran again; None if it did not."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts of what took place: migrations committed, chunks accepted, workers launched, and so on."""
    lines: tuple[str, ...] = ()


def percentiles(values: list[float]) -> dict[str, float | None]:
    """Return the median and the 99th percentile of `values`, interpolated; None for no values."""
    return {f"p{share}": float(np.percentile(values, share)) if values else None for share in (50, 99)}


def scale_of(seed: int, mechanisms: Mechanisms = Mechanisms.DRAWN, *, may_lend: bool = True) -> Scale:
    """Draw the size of this seed's deployment, its mechanisms and its tenants.

    `may_lend`: see `with_mechanisms`. Workers of several classes and workers that only denoise cannot.
    """
    chance = random.Random(f"scale {seed}")
    workers = chance.choice(WORKERS)
    scale = Scale(
        workers=workers,
        most_workers=workers + chance.choice(GROWTH),
        slots=chance.choice(SLOTS),
        gateways=chance.choice(GATEWAYS),
        stores=chance.choice(STORES),
    )
    return with_tenants(with_mechanisms(scale, seed, mechanisms, may_lend=may_lend), seed)


def with_classes(scale: Scale, seed: int) -> Scale:
    """Return the deployment with two classes on its workers, and without what such workers do not take.

    Capacity is then no number of slots, so no tenant has a part of those that are left.
    """
    return replace(
        without_residency(scale),
        classes=draw_classes(seed),
        fidelity=BEST,
        quality_debt_limit=0.0,
        absorb_at_maximum=False,
        host_workers=0,
        tenant_limits={**scale.tenant_limits, "tenant_slots_factor": 0.0},
    )


def with_offers(scale: Scale, seed: int) -> Scale:
    """Return the deployment with two kinds of workers, each of which serves one of two classes."""
    classes, file = draw_offers(seed)
    least, most = file.limits
    scale = replace(with_classes(scale, seed), classes=classes, pool_file=file)
    return replace(scale, workers=least, most_workers=most)


def with_roles(scale: Scale, seed: int) -> Scale:
    """Return the deployment with decode and text workers, and workers that only denoise and lend nothing."""
    return replace(scale, roles=draw_roles(seed, scale.models), host_workers=0)


def run_scenario(
    seed: int,
    *,
    seconds: float = 25.0,
    faults: Faults | None = None,
    scale: Scale | None = None,
    keep_lines: bool = False,
) -> ScenarioOutcome:
    """Run `seconds` of virtual time under faults, wait for the world to settle, then end every session."""
    climate, scale = draw(random.Random(f"climate {seed}")), scale or scale_of(seed)
    if scale.roles is not None:
        climate = with_role_faults(climate, seed)
    world = World(seed, climate if faults is None else faults, scale, keep_lines)
    injector = FaultInjector(world)
    with quiet(world):
        users = Users(world)
        world.begin()
        world.loop.advance(seconds)
        users.stop()
        injector.stop()
        world.mark_calm()
        settled_s = settle(world, users)
        if seed % WATCH_EVERY == 0:
            _watch(world)
        end(world, users)
        outcome = ScenarioOutcome(
            seed,
            dict(world.checker.violations),
            tuple(world.checker.messages),
            world.trace.digest,
            world.loop.callbacks,
            settled_s,
            world.counts(),
            tuple(world.trace.lines or ()),
        )
        world.close()
    return outcome


def settle(world: World, users: Users) -> float | None:
    began, loop = world.loop.time(), world.loop
    since: float | None = None
    trouble: str | None = None
    while loop.time() - began < SETTLE_S + STEADY_S:
        loop.advance(LOOK_S)
        trouble = unsettled(world, users)
        if trouble is not None:
            since = None
        elif since is None:
            since = loop.time()
        elif loop.time() - since >= STEADY_S:
            return since - began
    world.checker.fail("converges_after_faults", f"not within {SETTLE_S:g} s: {trouble}")
    return None


def _watch(world: World) -> None:
    """Check that the pool's size settles while no session begins or ends."""
    before = world.checker.decisions.resizes
    world.loop.advance(WATCHED_S)
    resizes = world.checker.decisions.resizes - before
    if resizes > RESIZES:
        world.checker.fail("bounded_scaling", f"{resizes} changes in {WATCHED_S:g} s of constant load")


def end(world: World, users: Users) -> None:
    began = world.loop.time()
    users.end_all()
    trouble: str | None = None
    while world.loop.time() - began < END_S:
        world.loop.advance(LOOK_S)
        alive = sum(not record.phase.ended for record in world.records())
        trouble = f"{alive} sessions do not end" if alive else held_memory(world)
        if trouble is None:
            return
    world.checker.fail("memory_returns", f"not within {END_S:g} s: {trouble}")


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
    if (beyond := world.checker.roles.unsettled()) is not None:
        return beyond
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
    several = world.scale.classes is not None
    if (world.checker.classes.room(record.model) if several else world.free_slots()) > 0:
        return f"it waits (last worker: {record.worker}) while slots are free"
    control = None if world.autoscaler is None else world.autoscaler.control
    if control is not None and control.absorbs and world.free_slots(absorbing=True) > 0:
        return f"it waits (last worker: {record.worker}) while workers with room absorb"
    if isinstance(control, CompositionLoop):
        return None if control.is_full(record.model) else "it waits while the pool can have a worker for it"
    feedback = None if control is None else control.controller.advisor.feedback_monitor.feedback
    if feedback is not None and are_limit(feedback):
        # Another worker would divide what the decode workers carry.
        return None
    if world.autoscaler is None or world.autoscaler.pool.target < world.scale.most_workers:
        return "it waits while the pool can grow"
    return None


def _unwatched(world: World, users: Users, record: SessionRecord) -> str | None:
    own = [
        viewer for viewer in users.viewers if (viewer.session, viewer.tenant) == (record.id, record.tenant)
    ]
    if not any(users.connected(viewer) for viewer in own):
        return None
    last = world.checker.log.of(record.id).last
    made = 0 if last is None else last.index + 1
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
