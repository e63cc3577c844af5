"""Processes under supervision: what is configured for them, and their present state."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """One process under supervision."""

    name: str
    wave: int = 0
    """Order of the start. The member starts once all members of lower waves have been ready."""
    rank: int = 0
    """Order of the stop. The member stops once all members of lower ranks have ended."""
    grace_s: float = 5.0
    """Time between the request to end and the kill, seconds."""
    start_limit_s: float = 120.0
    """Time limit of a start, seconds. Afterwards the member is killed, and so restarted."""
    silent_limit: int = 0
    """Number of unanswered checks in a row after which the member is killed, and so restarted. Applies to
    ready members and to restarts. 0: never."""
    failing_limit: int = 0
    """Failing answers in a row, with space on the disk, after which the member is restarted. 0: never."""
    launched: bool = True
    """Whether the supervisor starts the member. False for workers: the supervisor only stops them."""


@dataclass(frozen=True)
class Policy:
    """Delays and limits of restarts."""

    first_delay_s: float = 0.1
    longest_delay_s: float = 10.0
    settled_after_s: float = 20.0
    """Time after which a ready member's earlier crashes no longer count, seconds."""
    attempts_to_start: int = 5
    """Number of failed starts after which the stack gives up on a member that was never ready."""
    first_repair_delay_s: float = 15.0
    """Minimum time between two restarts because of failing answers, seconds. Doubles with every restart."""
    longest_repair_delay_s: float = 600.0
    start_with_room_s: float = 3.0
    """Time for a start on a full disk to succeed once there is space, seconds. Then the start is repeated."""


class State(enum.Enum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    """The process was asked to end because it fails. It restarts afterwards."""
    BACKOFF = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


class HealthAnswer(enum.Enum):
    """The result of a health check."""

    SERVES = "serves"
    SILENT = "silent"
    """No answer within the limit."""
    FAILS = "fails"
    """The process answered that it cannot do its work."""


@dataclass
class ProcessState:
    member: Member
    state: State = State.WAITING
    ever_ready: bool = False
    crashes: int = 0
    restarts: int = 0
    unanswered: int = 0
    failures: int = 0
    """Number of failing answers in a row with space on the disk."""
    repairs: int = 0
    """Number of restarts because of failing answers, without success so far."""
    repair_due_s: float = 0.0
    """Earliest time of the next restart because of failing answers."""
    room: bool = True
    """Whether the process's disk had space at the last check."""
    alarm: str | None = None
    """Why the process does not serve although a restart does not help. None: no alarm."""
    since_s: float = 0.0
    """When the current state began."""
    due_s: float | None = None
    """When the current state ends by itself."""
