"""Percentiles of the times of the scheduler's commands: apart from a failover, by hop and by minute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turboserve.experiments.scale.observed import HOPS, Command, percentiles

SLOWEST = 10
"""Number of slowest commands that are listed."""


def split(commands: Sequence[Command], killed_at: float | None) -> tuple[list[Command], list[Command]]:
    """Return the commands apart from the leader's failover, and those of events in it.

    The failover lasts from the kill to the first placement of an event after it.
    """
    if killed_at is None:
        return list(commands), []
    ends = min((one.placed_at for one in commands if one.asked_at >= killed_at), default=killed_at)
    inside = [one.placed_at >= killed_at and one.asked_at <= ends for one in commands]
    usual = [one for one, within in zip(commands, inside, strict=True) if not within]
    return usual, [one for one, within in zip(commands, inside, strict=True) if within]


def event_to_command(commands: Sequence[Command], killed_at: float | None, began_at: float) -> dict[str, Any]:
    """Return the results of `event_to_command_s`. `began_at`: when the run began, Unix seconds."""
    usual, _ = split(commands, killed_at)
    return {
        **seconds(usual),
        "with_failover": seconds(commands),
        "by_event": {kind: seconds([one for one in usual if one.kind == kind]) for kind in kinds(usual)},
        "by_hop": {hop: percentiles([one.hops[hop] for one in usual]) for hop in HOPS},
        "by_minute": {str(n): seconds(part) for n, part in enumerate(by_minute(usual, began_at))},
        "slowest": [
            {
                "at_s": round(one.asked_at - began_at, 1),
                "event": one.kind,
                "seconds": round(one.seconds, 3),
                **{hop: round(took, 3) for hop, took in one.hops.items()},
            }
            for one in sorted(usual, key=lambda one: -one.seconds)[:SLOWEST]
        ],
    }


def seconds(commands: Sequence[Command]) -> dict[str, float | int | None]:
    """Return percentiles of the commands' times."""
    return percentiles([one.seconds for one in commands])


def kinds(commands: Sequence[Command]) -> list[str]:
    """Return the types of the events."""
    return sorted({one.kind for one in commands})


def by_minute(commands: Sequence[Command], began_at: float) -> list[list[Command]]:
    """Return the commands by the minute of their events."""
    minutes = [int(max(one.asked_at - began_at, 0.0) // 60.0) for one in commands]
    parts: list[list[Command]] = [[] for _ in range(max(minutes, default=-1) + 1)]
    for minute, one in zip(minutes, commands, strict=True):
        parts[minute].append(one)
    return parts
