"""When a worker borrows, lends and returns. Pure (SlackServe, 4.3; the donor's rules are stricter here)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.playout import Playout

MOST_CREDIT_S = 3600.0
RELEASE_CHUNKS = 2.0
"""Credit at which a home returns its donor, as a multiple of T."""


@dataclass(frozen=True)
class Measured:
    """What the policy reads of a worker's sessions, at one time."""

    credits: Mapping[str, tuple[float, float]]
    """Credit C and time of a chunk T of each session that may borrow, seconds."""
    lends: bool
    """Whether the worker's own sessions permit a loan: see `may_lend`."""
    least_credit_s: float
    """Least credit of the worker's sessions; `MOST_CREDIT_S` if it has none whose slack shrinks."""


def measure(playouts: Mapping[str, Playout], borrowable: Iterable[str], limit_s: float) -> Measured:
    """Reduce a measurement. `borrowable`: sessions that may borrow; `limit_s`: see `may_lend`."""
    shrinking = {name: one for name, one in playouts.items() if one.playing}
    candidates = {name: shrinking[name] for name in borrowable if name in shrinking}
    return Measured(
        {name: (one.credit_s, one.next_s) for name, one in candidates.items()},
        may_lend(shrinking.values(), limit_s),
        min((one.credit_s for one in shrinking.values()), default=MOST_CREDIT_S),
    )


def measure_engine(engine: Engine, now: float, borrowable: Iterable[str], limit_s: float) -> Measured:
    """Measure an engine's sessions. See `measure`.

    A worker lends only while no chunk would be late after a forward that takes as long as it may: the limit,
    and less than a chunk's time for what the donor itself computes. So its sessions' turns count, too.
    """
    found = measure(engine.playouts(now), borrowable, limit_s)
    if found.lends and not engine.in_time_after(now, limit_s + engine.pacing.chunk_seconds):
        return replace(found, lends=False)
    return found


def may_lend(shrinking: Iterable[Playout], limit_s: float) -> bool:
    """Whether all sessions are relaxed, and stay without a stall if the home freezes within a forward.

    `shrinking`: the sessions whose slack shrinks. `limit_s`: longest time of a forward's exchanges, seconds.
    What the donor itself computes in the forward takes less than a chunk's time T.
    """
    return all(one.tier == "relaxed" and one.credit_s >= limit_s + one.next_s for one in shrinking)


def neediest(measured: Measured) -> str | None:
    """The session that borrows: that of the least credit, if it is below zero."""
    name = min(measured.credits, key=lambda each: (measured.credits[each][0], each), default=None)
    return name if name is not None and measured.credits[name][0] < 0 else None


def releases(measured: Measured, session: str) -> bool:
    """Whether the home returns the donor: the session has recovered, or is not there any more."""
    if session not in measured.credits:
        return True
    credit_s, chunk_s = measured.credits[session]
    return credit_s >= RELEASE_CHUNKS * chunk_s
