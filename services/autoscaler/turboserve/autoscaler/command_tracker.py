"""The core's paperwork: numbers for commands, which are under way, what was done."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from turboserve.autoscaler.messages import Command
from turboserve.autoscaler.pool_members import PoolMember

ACTIONS_KEPT = 32


@dataclass(frozen=True)
class ActionRecord:
    """One thing that was done, for operators."""

    at: float
    action: str
    reason: str
    member: str | None = None
    worker: str | None = None


class CommandTracker:
    """Tickets and stamps are one row of numbers: what was learnt can be ordered against what was asked."""

    def __init__(self) -> None:
        self.actions: deque[ActionRecord] = deque(maxlen=ACTIONS_KEPT)
        self._number = 0
        self._out: list[Command] = []
        self._under_way: dict[int, Command] = {}

    def stamp(self) -> int:
        self._number += 1
        return self._number

    def take(self, member: PoolMember) -> int:
        """A ticket for the slot's one command; what was under way for it before does not matter any more."""
        member.ticket = self.stamp()
        return member.ticket

    def send(self, command: Command) -> None:
        self._under_way[command.ticket] = command
        self._out.append(command)

    def answered(self, ticket: int) -> Command | None:
        """The command that is answered; None if it was answered before."""
        return self._under_way.pop(ticket, None)

    def collect(self) -> list[Command]:
        """The commands sent since the last time."""
        out, self._out = self._out, []
        return out

    def act(self, now: float, action: str, reason: str, member: PoolMember | None = None) -> None:
        name, worker = (member.name, member.worker) if member is not None else (None, None)
        self.actions.append(ActionRecord(now, action, reason, name, worker))
