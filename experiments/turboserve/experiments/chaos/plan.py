"""The plan of a run: every fault and every user action, from the seed alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from turboserve.cli.stack.decode_pool import DECODE_WORKER
from turboserve.experiments.chaos.degradations import (
    DISK_TARGETS,
    NETWORK_TARGETS,
    SECOND_NETWORK_TARGETS,
    SECOND_SERVICE_LINKS,
    SERVICE_LINKS,
)
from turboserve.experiments.chaos.user_actions import (
    LIMIT_ACTIONS,
    SHIPPED_ACTIONS,
    WATCHING_ACTIONS,
    UserAction,
    actions_of,
)

SERVICES = ("gateway", "scheduler", "autoscaler", "state-store")
SERVERS = ("nats", "redis", "postgres")
WORKER = "worker"
WORKERS = WORKER, DECODE_WORKER
QUIET_S = 4.0
"""Time before the first fault, in which clients begin to watch."""
LONGEST_STOP_S = 8.0
LONGEST_WORKER_STOP_S = 20.0
"""Longer than the worker's timeout: the worker resumes after its sessions were given to others."""


class FaultKind(StrEnum):
    """How a process is hit."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after `Fault.seconds`."""
    RESTART = "restart"
    """SIGTERM to a server, which its supervisor starts again."""
    DISK_FULL = "disk_full"
    """The disk of the stack's data has no free block."""
    DESCRIPTORS = "descriptors"
    """Idle connections take every descriptor that the gateway may open."""
    CLOCK_STEP = "clock_step"
    """The wall clock of services and workers jumps by `Fault.step_s`, and back at the end."""
    BROKER_FROZEN = "broker_frozen"
    """SIGSTOP to NATS for longer than its supervisor waits for answers."""
    ONE_FROZEN = "one_frozen"
    """SIGSTOP to one process of a stack with redundancy."""
    TWO_FROZEN = "two_frozen"
    """SIGSTOP to two processes of a stack with redundancy at once."""
    SLOW_NETWORK = "slow_network"
    """The network between two processes, or to the viewers, is slow, lossy or silent."""
    SLOW_DISK = "slow_disk"
    """The disk of one server or service is slow."""
    BEHIND = "behind"
    """One service gets almost no bytes from the broker for minutes, and then catches up."""


class FaultGroup(StrEnum):
    """Groups of faults of a run."""

    PROCESS = "process"
    """Processes are killed, stopped and restarted."""
    DISK_FULL = FaultKind.DISK_FULL.value
    DESCRIPTORS = FaultKind.DESCRIPTORS.value
    CLOCK_STEP = FaultKind.CLOCK_STEP.value
    BROKER_FROZEN = FaultKind.BROKER_FROZEN.value
    ONE_FROZEN = FaultKind.ONE_FROZEN.value
    TWO_FROZEN = FaultKind.TWO_FROZEN.value
    SLOW_NETWORK = FaultKind.SLOW_NETWORK.value
    SLOW_DISK = FaultKind.SLOW_DISK.value
    BEHIND = FaultKind.BEHIND.value


TARGETS = {
    FaultGroup.DISK_FULL: "disk",
    FaultGroup.DESCRIPTORS: "gateway",
    FaultGroup.CLOCK_STEP: "services",
    FaultGroup.BROKER_FROZEN: "nats",
}
LASTING_S = {
    FaultGroup.DISK_FULL: (40.0, 56.0),
    FaultGroup.DESCRIPTORS: (15.0, 40.0),
    FaultGroup.CLOCK_STEP: (10.0, 20.0),
    FaultGroup.BROKER_FROZEN: (30.0, 120.0),
    FaultGroup.ONE_FROZEN: (20.0, 20.0),
    FaultGroup.TWO_FROZEN: (20.0, 20.0),
    FaultGroup.SLOW_NETWORK: (15.0, 30.0),
    FaultGroup.SLOW_DISK: (15.0, 30.0),
    FaultGroup.BEHIND: (120.0, 150.0),
}
"""Shortest and longest duration, in seconds."""
REDUNDANT: dict[str, tuple[str, ...]] = {
    "gateway": ("gateway", "gateway-2"),
    "scheduler": ("scheduler", "scheduler-2"),
    "state-store": ("state-store", "state-store-2"),
    "nats": ("nats", "nats-2", "nats-3"),
    "autoscaler": ("autoscaler", "autoscaler-2"),
    WORKER: (WORKER, WORKER),
}
"""Service → its processes that freeze. No two of one service freeze at once, except workers: what both of two
gateways served has no other place."""
FREEZES: dict[FaultGroup, tuple[str, ...]] = {
    FaultGroup.ONE_FROZEN: tuple(name for names in REDUNDANT.values() for name in names),
    FaultGroup.TWO_FROZEN: (
        f"{WORKER}+{WORKER}",
        *(
            f"{one}+{other}"
            for first, second in itertools.combinations(REDUNDANT, 2)
            for one in REDUNDANT[first]
            for other in dict.fromkeys(REDUNDANT[second])
        ),
    ),
}
"""Group → targets, which a run takes in an order of the seed's."""
DEGRADATIONS: dict[FaultGroup, tuple[str, ...]] = {
    FaultGroup.SLOW_NETWORK: NETWORK_TARGETS,
    FaultGroup.SLOW_DISK: DISK_TARGETS,
    FaultGroup.BEHIND: SERVICE_LINKS,
}
"""The same for what slows down."""
SECOND_DEGRADATIONS: dict[FaultGroup, tuple[str, ...]] = {
    FaultGroup.SLOW_NETWORK: (*NETWORK_TARGETS, *SECOND_NETWORK_TARGETS),
    FaultGroup.BEHIND: (*SERVICE_LINKS, *SECOND_SERVICE_LINKS),
}
"""The same in a stack with redundancy, where it differs."""
SECOND_PROCESSES = tuple(
    name for service, names in REDUNDANT.items() if service not in (WORKER, "scheduler") for name in names[1:]
)
"""Further targets of process faults in a stack with redundancy. Its schedulers are counted anyway."""
CLOCK_STEP_S = 3600.0
LASTING_SHARE = 0.3
"""Share of the lasting faults in a run that has process faults as well."""
AFTERWARDS_S = 12.0
"""Time between the end of a lasting fault and the next fault, so that each recovery is from one fault."""


@dataclass(frozen=True)
class Fault:
    """One fault. Times are seconds after the run's beginning."""

    at_s: float
    target: str
    """A process of the stack, or `worker`. Two are joined by `+`."""
    kind: FaultKind
    seconds: float = 0.0
    """Duration of a stop or of a lasting fault."""
    which: int = 0
    """For workers: the number among those alive, modulo their count."""
    step_s: float = 0.0
    """For a step of the clock: its size."""

    @property
    def targets(self) -> list[str]:
        return self.target.split("+")

    @property
    def freezes(self) -> bool:
        """Whether a stack with redundancy is to hide the fault from viewers."""
        return self.kind in (FaultKind.ONE_FROZEN, FaultKind.TWO_FROZEN)

    @property
    def degrades(self) -> bool:
        """Whether the fault slows down what it hits. `target` then names what is hit, and how."""
        return self.kind in (FaultKind.SLOW_NETWORK, FaultKind.SLOW_DISK, FaultKind.BEHIND)

    @property
    def lasts(self) -> bool:
        """Whether the fault has an end of its own, from which recovery counts."""
        return self.kind not in (FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART)

    def describe(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.lasts or self.kind is FaultKind.STOP else ""
        if self.step_s:
            lasting = f" by {self.step_s:+.0f} s{lasting}"
        return f"{self.at_s:.1f} s: {self.kind.value} {self.target}{lasting}"


@dataclass(frozen=True)
class Plan:
    faults: tuple[Fault, ...]
    actions: tuple[UserAction, ...]


def decode_worker_names(count: int) -> tuple[str, ...]:
    """Return the names of so many decode workers in a stack."""
    return tuple(
        f"{DECODE_WORKER}-{number}" if number > 1 else DECODE_WORKER for number in range(1, count + 1)
    )


def plan(
    seed: int,
    seconds: float,
    sessions: int,
    schedulers: int,
    gap_s: float,
    groups: Sequence[FaultGroup] = (FaultGroup.PROCESS,),
    decoders: Sequence[str] = (),
    *,
    limits: bool = False,
    redundancy: bool = False,
) -> Plan:
    """Plan faults about `gap_s` apart and actions of every session, within `seconds`.

    The same seed gives the same plan. With `limits`, the actions of `LIMIT_ACTIONS` come in addition. With
    `decoders`, the names of decode workers, process faults hit these as often as workers. With
    `redundancy`, faults also hit the second processes of services and their connections. During a lasting
    fault, and shortly after it, there is no other fault.
    """
    chance = random.Random(f"chaos {seed}")
    targets = [*SERVICES, *SERVERS, *(f"scheduler-{n}" for n in range(2, schedulers + 1)), *[WORKER] * 3]
    targets += SECOND_PROCESSES if redundancy else ()
    targets += [decoders[number % len(decoders)] for number in range(3)] if decoders else ()
    faults: list[Fault] = []
    at = QUIET_S
    lasting = [group for group in groups if group is not FaultGroup.PROCESS]
    # The groups take turns in an order of the seed's, so a short run covers as many kinds as it has time for.
    chance_of_groups = random.Random(f"chaos groups {seed}")
    chance_of_groups.shuffle(lasting)
    targets_of = FREEZES | DEGRADATIONS | (SECOND_DEGRADATIONS if redundancy else {})
    drawn = {group: _without_end(chance_of_groups, found) for group, found in targets_of.items()}
    turn = 0
    while (at := at + chance.uniform(0.5, 1.5) * gap_s) < seconds:
        if lasting and (FaultGroup.PROCESS not in groups or chance_of_groups.random() < LASTING_SHARE):
            group = lasting[turn % len(lasting)]
            target = next(drawn[group]) if group in drawn else TARGETS[group]
            fault = _lasting(chance_of_groups, round(at, 2), group, target)
            turn += 1
            at += fault.seconds + AFTERWARDS_S
            if faults and at > seconds + AFTERWARDS_S:
                break
        else:
            fault = _fault(chance, round(at, 2), chance.choice(targets))
        faults.append(fault)
    actions = [
        action
        for session in range(sessions)
        for action in actions_of(
            chance, session, seconds, WATCHING_ACTIONS if set(groups) <= set(FREEZES) else SHIPPED_ACTIONS
        )
    ]
    if limits:
        chance_of_limits = random.Random(f"chaos limits {seed}")
        for session in range(sessions):
            actions += actions_of(chance_of_limits, session, seconds, LIMIT_ACTIONS)
    return Plan(tuple(faults), tuple(sorted(actions, key=lambda action: (action.at_s, action.session))))


def _without_end(chance: random.Random, targets: Sequence[str]) -> Iterator[str]:
    """Yield all targets in a random order, again and again."""
    order = list(targets)
    while True:
        chance.shuffle(order)
        yield from order


def _lasting(chance: random.Random, at_s: float, group: FaultGroup, target: str) -> Fault:
    step_s = chance.choice((CLOCK_STEP_S, -CLOCK_STEP_S)) if group is FaultGroup.CLOCK_STEP else 0.0
    seconds = round(chance.uniform(*LASTING_S[group]), 2)
    which = chance.randrange(1_000) if group in FREEZES else 0
    return Fault(at_s, target, FaultKind(group.value), seconds, which, step_s)


def _fault(chance: random.Random, at_s: float, target: str) -> Fault:
    process_faults = (
        (FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART)
        if target.partition("-")[0] in SERVERS
        else (FaultKind.KILL, FaultKind.STOP)
    )
    longest = LONGEST_WORKER_STOP_S if target.startswith(WORKERS) else LONGEST_STOP_S
    return Fault(
        at_s,
        target,
        chance.choice(process_faults),
        round(chance.uniform(0.5, longest), 2),
        chance.randrange(1_000),
    )
