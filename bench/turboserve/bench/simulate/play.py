"""One seed from beginning to end: faults, calm, an end to everything; what was found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from turboserve.bench.simulate.faults import Faults
from turboserve.bench.simulate.world import World

SETTLE_S = 60.0
"""Bound of invariant 5, in a world whose time-outs are half of the shipped ones."""
STEADY_S = 3.0
WATCHED_S = 30.0
"""Of one seed in `WATCH_EVERY`: how long the pool is watched under constant load."""
WATCH_EVERY = 8
RESIZES = 3
"""Changes of the pool's size in that time, at most: what idle sessions let go of, and no more."""
END_S = 30.0
LOOK_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """What one seed showed."""

    seed: int
    violations: dict[str, int]
    messages: tuple[str, ...]
    digest: str
    events: int
    settled_s: float | None
    """Virtual time from the last fault until everything ran again; None: it did not."""
    counts: dict[str, int] = field(default_factory=dict)
    """What took place: moves committed, chunks accepted, workers lost, and so on."""
    lines: tuple[str, ...] = ()


@contextmanager
def quiet() -> Iterator[None]:
    """The cores' and executors' log lines are for operators; thousands of runs have too many of them."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def play(
    seed: int, *, seconds: float = 25.0, faults: Faults | None = None, keep_lines: bool = False
) -> Outcome:
    """Play `seconds` of virtual time under faults, then wait for calm, then end every session."""
    with quiet():
        world = World(seed, keep_lines, faults)
        world.kernel.run(seconds)
        world.users.stop()
        world.calm()
        settled_s = _settle(world)
        if seed % WATCH_EVERY == 0:
            _watch(world)
        _end(world)
        checker, kernel = world.checker, world.kernel
        world.close()
    return Outcome(
        seed,
        dict(checker.violations),
        tuple(checker.messages),
        kernel.digest,
        kernel.events,
        settled_s,
        world.counts(),
        tuple(kernel.lines or ()),
    )


def _settle(world: World) -> float | None:
    began, kernel = world.kernel.now, world.kernel
    since: float | None = None
    trouble: str | None = None
    while kernel.now - began < SETTLE_S + STEADY_S:
        kernel.run(LOOK_S)
        trouble = world.checker.unsettled()
        if trouble is not None:
            since = None
        elif since is None:
            since = kernel.now
        elif kernel.now - since >= STEADY_S:
            return since - began
    world.checker.fail("converges_after_faults", f"not within {SETTLE_S:g} s: {trouble}")
    return None


def _watch(world: World) -> None:
    """Nobody comes or goes: the pool comes to rest."""
    before = world.checker.resizes
    world.kernel.run(WATCHED_S)
    resizes = world.checker.resizes - before
    if resizes > RESIZES:
        world.checker.fail("bounded_scaling", f"{resizes} changes in {WATCHED_S:g} s of constant load")


def _end(world: World) -> None:
    began, kernel = world.kernel.now, world.kernel
    world.users.end_all()
    trouble: str | None = None
    while kernel.now - began < END_S:
        kernel.run(LOOK_S)
        alive = sum(not record.phase.ended for record in world.database.rows())
        trouble = f"{alive} sessions do not end" if alive else world.checker.memory()
        if trouble is None:
            return
    world.checker.fail("memory_returns", f"not within {END_S:g} s: {trouble}")
