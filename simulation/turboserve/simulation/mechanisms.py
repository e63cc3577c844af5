"""The mechanisms of playout slack that a deployment under faults uses: none, all, or what its seed draws."""

from __future__ import annotations

import random
from dataclasses import replace
from enum import StrEnum

from turboserve.simulation.settings import Scale

USED_IN = 0.35
"""Share of the seeds that use mechanisms."""
ALL_IN = 0.3
"""Share of these seeds that use all of them."""
EACH_IN = 0.5
"""Share of the others that use one mechanism."""
RESIDENCY_IN = 0.15
"""Share of the seeds whose workers have more sessions than slabs."""
HOST_SESSIONS = (1, 1, 2, 3)
"""Choices for the number of sessions beyond the slabs."""
COPIES_S = (0.01, 0.1, 0.3)
"""Choices for the time of a copy of a state between slab and host."""
LOANS_IN = 0.15
"""Share of the seeds whose workers lend each other their devices."""
HOST_WORKERS = (2, 3)
"""Choices for the number of workers of one host."""
LENDING_SLOTS = 3
"""Least number of slots of these workers: with all of them in use, a device is too slow."""
EXCHANGE_LIMITS_S = (0.3, 0.5, 1.5)
"""Choices for the longest time of the exchanges of a forward of two workers."""
NAMES = ("fidelity", "gather", "rescues", "absorption", "forecast")


class Mechanisms(StrEnum):
    """The mechanisms of playout slack: fidelity, tiers, rescues, absorption, admission by forecast, more
    sessions than slabs, and loans between workers."""

    DRAWN = "drawn"
    """Each seed draws its own."""
    ALL = "all"
    NONE = "none"
    LOANS = "loans"
    """Every seed: workers lend each other their devices, and use nothing else."""


WITHOUT_SLACK = (Mechanisms.NONE, Mechanisms.LOANS)


def with_mechanisms(
    scale: Scale, seed: int, mechanisms: Mechanisms = Mechanisms.DRAWN, *, may_lend: bool = True
) -> Scale:
    """Return the deployment with its mechanisms. The seed also draws their parameters.

    The draws are independent of all others of the seed. So a seed without mechanisms runs as before.
    `may_lend`: whether the deployment's workers can lend each other their devices.
    """
    scale = _with_residency(_with_slack(scale, seed, mechanisms), seed, mechanisms)
    return _with_loans(scale, seed, mechanisms) if may_lend else scale


def without_residency(scale: Scale) -> Scale:
    """Return the deployment with as many sessions as slabs."""
    more = 0 if scale.quality_debt_limit > 0 else scale.host_sessions
    return replace(scale, host_sessions=0, slots=scale.slots - more)


def _with_loans(scale: Scale, seed: int, mechanisms: Mechanisms) -> Scale:
    chance = random.Random(f"host loans {seed}")
    host_workers, limit_s = chance.choice(HOST_WORKERS), chance.choice(EXCHANGE_LIMITS_S)
    used = chance.random() < LOANS_IN
    if mechanisms is Mechanisms.NONE or (mechanisms is Mechanisms.DRAWN and not used):
        return scale
    workers = max(2, scale.workers)
    return replace(
        scale,
        slots=max(LENDING_SLOTS, scale.slots),
        workers=workers,
        most_workers=max(workers, scale.most_workers),
        host_workers=host_workers,
        exchange_limit_s=limit_s,
    )


def _with_residency(scale: Scale, seed: int, mechanisms: Mechanisms) -> Scale:
    chance = random.Random(f"residency {seed}")
    used, more, copy_s = (
        chance.random() < RESIDENCY_IN,
        chance.choice(HOST_SESSIONS),
        chance.choice(COPIES_S),
    )
    if mechanisms in WITHOUT_SLACK or (mechanisms is Mechanisms.DRAWN and not used):
        return scale
    if scale.quality_debt_limit > 0:
        # While it absorbs, a worker has sessions beyond the slabs.
        return replace(scale, host_sessions=min(more, scale.slots), state_copy_s=copy_s)
    return replace(scale, slots=scale.slots + more, host_sessions=more, state_copy_s=copy_s)


def _with_slack(scale: Scale, seed: int, mechanisms: Mechanisms) -> Scale:
    chance = random.Random(f"mechanisms {seed}")
    used, everything = chance.random() < USED_IN, chance.random() < ALL_IN
    drawn = {name for name in NAMES if chance.random() < EACH_IN}
    horizon_s, limit = chance.choice((3.0, 8.0)), chance.choice((0.02, 0.3))
    at_maximum, slot_s = chance.random() < 0.5, chance.choice((2.0, 10.0))
    if mechanisms in WITHOUT_SLACK or (mechanisms is Mechanisms.DRAWN and not used):
        return scale
    if mechanisms is Mechanisms.ALL or everything:
        drawn = set(NAMES)
    if "absorption" in drawn:
        scale = replace(scale, quality_debt_limit=limit, absorb_at_maximum=at_maximum)
    if drawn & {"absorption", "fidelity"}:
        scale = replace(scale, fidelity="in-time")
    if "gather" in drawn:
        scale = replace(scale, gather="tiers")
    if "rescues" in drawn:
        scale = replace(scale, rescue_horizon_s=horizon_s)
    if "forecast" in drawn:
        scale = replace(scale, admission_slot_s=slot_s)
    return scale
