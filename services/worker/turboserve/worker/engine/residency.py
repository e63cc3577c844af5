"""Which session leaves its slab for host memory, and which one returns. Pure: views → one decision.

SlackServe (3.2) evicts the resident of the highest credit when a session that is to run has no slab. Here the
exchange also has to pay: the evicted session must return in time, by what is known now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class ResidencyOptions:
    """Limits of the exchange of sessions, seconds."""

    copy_out_s: float
    """Time to copy a state to the host."""
    copy_in_s: float
    """Time to copy a state back, until its session may compute."""
    least_residence_s: float
    """Time for which a session stays in its slab after it has come."""
    least_gain_s: float
    """Credit by which an evicted session exceeds the one that gets its slab: hysteresis."""
    patience_s: float = 0.5
    """Lateness of a session from which it may make another session late, if less than itself."""

    @property
    def exchange_s(self) -> float:
        """Time in which one session replaces another in a slab."""
        return self.copy_out_s + self.copy_in_s


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """A session as the policy sees it. Times are seconds from now."""

    session: str
    resident: bool
    """Whether it has a slab."""
    credit_s: float
    """Service credit; infinite if nothing of it has a deadline."""
    return_by_s: float
    """Latest begin of its copy back with which its next chunk is in time: its deadline, less the time to copy
    back, less its own forwards. Negative: it will be late. Infinite: it has no deadline."""
    wants: bool
    """Whether something of it may be computed now."""
    late_s: float = 0.0
    """Time since `return_by_s` has passed without a slab."""
    resident_s: float = 0.0
    """Time since it got its slab."""
    movable: bool = True
    """Whether it may leave: it generates, and is in no migration, loan, rebuild or suspension."""

    @property
    def _waiting_credit_s(self) -> float:
        return self.credit_s - self.late_s

    @property
    def turn(self) -> tuple[float, str]:
        """Order in which sessions without a slab return: the earliest first. Lateness counts, so that none
        waits forever."""
        return self.return_by_s - self.late_s, self.session


@dataclass(frozen=True)
class Return:
    """Copy this session back to a free slab."""

    session: str


@dataclass(frozen=True)
class Offload:
    """Copy this session to the host at its next chunk boundary; its slab is for `successor`."""

    session: str
    successor: str


@dataclass(frozen=True)
class NoExchange:
    """Change nothing for `seconds`, unless a session changes. Infinite: until one does."""

    seconds: float


Decision = Return | Offload | NoExchange


def decide(views: Iterable[ResidencyView], free_slabs: int, options: ResidencyOptions) -> Decision:
    """Choose the next exchange. Call it when no copy is in progress.

    1. A free slab goes to the session without one that must return first.
    2. Otherwise, that session gets the slab of the resident of the highest credit that may leave
       (`_predecessor`): when its return must begin, together with those of all others that wait for the same
       copies, or at once where the resident has nothing to compute.
    """
    known = list(views)
    outside = sorted((one for one in known if not one.resident), key=lambda one: one.turn)
    waiting = [one for one in outside if one.wants or one.return_by_s < inf]
    if not waiting:
        return NoExchange(inf)
    if free_slabs > 0:
        first = next((one for one in waiting if one.wants), waiting[0])
        begin_s = _begin_by_s(waiting, options)
        return Return(first.session) if first.wants or begin_s <= 0 else NoExchange(begin_s)
    begin_s = _begin_by_s(waiting, options)
    urgent = begin_s <= 0
    successor = waiting[0] if urgent else next((one for one in waiting if one.wants), waiting[0])
    inside = sorted(
        (one for one in known if one.resident and one.movable), key=lambda one: (-one.credit_s, one.session)
    )
    again_s = inf
    for resident in inside:
        if not urgent and (resident.wants or not successor.wants):
            continue
        stays_s = options.least_residence_s - resident.resident_s
        if stays_s > 0:
            again_s = min(again_s, stays_s)
        elif _leaves(resident, successor, waiting, options):
            return Offload(resident.session, successor.session)
    return NoExchange(again_s if urgent else min(begin_s, again_s))


def returns_s(
    turns: Iterable[tuple[float, str]], free_slabs: int, options: ResidencyOptions, busy_s: float = 0.0
) -> dict[str, float]:
    """Earliest time at which each session without a slab may compute, seconds from now.

    They return in the order of their turns. The first take the free slabs, and each other one an exchange
    with a session that leaves.

    Args:
        turns: `ResidencyView.turn` of each.
        free_slabs: Number of slabs without a session.
        options: The times of the copies.
        busy_s: Rest of the copy in progress.
    """
    found: dict[str, float] = {}
    for number, (_, session) in enumerate(sorted(turns)):
        busy_s += options.copy_in_s if number < free_slabs else options.exchange_s
        found[session] = busy_s
    return found


def _begin_by_s(waiting: Sequence[ResidencyView], options: ResidencyOptions) -> float:
    """Latest begin of the first exchange with which all of `waiting` return in time, one after the other."""
    begin_s = inf
    for one in reversed(waiting):
        begin_s = min(one.return_by_s - options.copy_out_s, begin_s - options.exchange_s)
    return begin_s


def _leaves(
    resident: ResidencyView,
    successor: ResidencyView,
    waiting: Sequence[ResidencyView],
    options: ResidencyOptions,
) -> bool:
    """Whether `resident` may be evicted for `successor`: it has more credit, and returns in time.

    It returns after those of `waiting` that must return before it, and not before the successor's least
    residence is over. A successor that is late already may make the resident less late than itself.
    """
    if resident.credit_s <= successor._waiting_credit_s + options.least_gain_s:
        return False
    before = sum(one.return_by_s <= resident.return_by_s for one in waiting)
    queue_s = max(before, 1) * options.exchange_s
    ready_s = max(queue_s, options.exchange_s + options.least_residence_s) + options.copy_out_s
    late_s = max(0.0, ready_s - resident.return_by_s)
    if late_s <= 0:
        return True
    return successor.late_s > options.patience_s and successor.late_s > late_s + options.least_gain_s
