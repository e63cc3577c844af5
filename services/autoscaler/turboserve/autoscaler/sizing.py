"""Chooses which pool members are wanted, given their number."""

from __future__ import annotations

from turboserve.autoscaler.pool_members import KEEPABLE, PoolMember
from turboserve.contracts.pool import PoolMemberPhase

LARGEST = 4_096
"""Maximum number of workers in one pool."""

_COST = {
    PoolMemberPhase.VACANT: 0,
    PoolMemberPhase.BACKING_OFF: 1,
    PoolMemberPhase.RELEASING: 1,
    PoolMemberPhase.RESERVING: 2,
    PoolMemberPhase.LAUNCHING: 3,
    PoolMemberPhase.LOADING: 4,
}


def fit(members: dict[str, PoolMember], target: int, pool: str, now: float) -> None:
    """Make exactly `target` members wanted. New members get the lowest free index."""
    wanted = [member for member in members.values() if member.wanted]
    surplus = len(wanted) - target
    if surplus > 0:
        for member in sorted(wanted, key=_least_missed)[:surplus]:
            member.wanted = False
    for _ in range(-surplus):
        again = [
            s for s in members.values() if not s.wanted and not s.drain_requested and s.phase in KEEPABLE
        ]
        if again:
            min(again, key=lambda member: member.index).wanted = True
            continue
        index = next(i for i in range(len(members) + 1) if f"{pool}-{i}" not in members)
        member = PoolMember(f"{pool}-{index}", index, since=now)
        members[member.name] = member


def _least_missed(member: PoolMember) -> tuple[int, int, int]:
    """Sort key of members to give up: first those without a worker, then those with the fewest sessions."""
    return _COST.get(member.phase, 5), member.held, -member.index
