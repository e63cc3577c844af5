"""What will happen in a run: every fault and everything that people do, from the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

SERVICES = ("gateway", "scheduler", "autoscaler", "state-store")
SERVERS = ("nats", "redis", "postgres")
WORKER = "worker"
QUIET_S = 4.0
"""Nothing is broken before this; people have begun to watch."""
LONGEST_STOP_S = 8.0
LONGEST_WORKER_STOP_S = 20.0
"""Longer than the worker's time-out: it wakes up to find its sessions gone."""


class Blow(StrEnum):
    """How a process is hit."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `Fault.seconds`."""
    RESTART = "restart"
    """SIGTERM to a server, which its supervisor starts again."""


@dataclass(frozen=True)
class Fault:
    """One process is hit. Times are seconds after the run's beginning."""

    at_s: float
    target: str
    """A process of the stack, or `worker`."""
    blow: Blow
    seconds: float = 0.0
    """For a stop: how long it stands still."""
    which: int = 0
    """For workers: the number among those alive, modulo their count."""

    def describe(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.blow is Blow.STOP else ""
        return f"{self.at_s:.1f} s: {self.blow.value} {self.target}{lasting}"


class Act(StrEnum):
    """What somebody does to a session."""

    PROMPT = "prompt"
    PAUSE = "pause"
    """And resume after `Deed.seconds`."""
    MOVE = "move"
    CUT = "cut"
    """The viewer's connection breaks."""


@dataclass(frozen=True)
class Deed:
    at_s: float
    session: int
    act: Act
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    faults: tuple[Fault, ...]
    deeds: tuple[Deed, ...]


def plan(seed: int, seconds: float, sessions: int, schedulers: int, gap_s: float) -> Plan:
    """Faults about `gap_s` apart and deeds of every session, within `seconds`; the same for the same seed."""
    chance = random.Random(f"chaos {seed}")
    targets = [*SERVICES, *SERVERS, *(f"scheduler-{n}" for n in range(2, schedulers + 1)), *[WORKER] * 3]
    faults: list[Fault] = []
    at = QUIET_S
    while (at := at + chance.uniform(0.5, 1.5) * gap_s) < seconds:
        faults.append(_fault(chance, round(at, 2), chance.choice(targets)))
    deeds = [deed for session in range(sessions) for deed in _deeds(chance, session, seconds)]
    return Plan(tuple(faults), tuple(sorted(deeds, key=lambda deed: (deed.at_s, deed.session))))


def _fault(chance: random.Random, at_s: float, target: str) -> Fault:
    blows = (Blow.KILL, Blow.STOP, Blow.RESTART) if target in SERVERS else (Blow.KILL, Blow.STOP)
    longest = LONGEST_WORKER_STOP_S if target == WORKER else LONGEST_STOP_S
    return Fault(
        at_s, target, chance.choice(blows), round(chance.uniform(0.5, longest), 2), chance.randrange(1_000)
    )


def _deeds(chance: random.Random, session: int, seconds: float) -> list[Deed]:
    deeds: list[Deed] = []
    at = 1.0
    while (at := at + chance.uniform(4.0, 12.0)) < seconds:
        act = chance.choices(list(Act), weights=(4, 2, 2, 1))[0]
        pause_s = round(chance.uniform(1.0, 5.0), 2) if act is Act.PAUSE else 0.0
        deeds.append(Deed(round(at, 2), session, act, pause_s))
        at += pause_s
    return deeds
