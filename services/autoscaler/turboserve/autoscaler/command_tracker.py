"""Tracks the core's commands: their tickets, which are under way, and the actions taken."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from turboserve.autoscaler.messages import Command
from turboserve.autoscaler.pool_members import PoolMember

ACTIONS_KEPT = 32


@dataclass(frozen=True)
class ActionRecord:
    """One action on the pool, for operators."""

    at: float
    action: str
    reason: str
    member: str | None = None
    worker: str | None = None


class CommandTracker:
    """Gives tickets and stamps from one sequence, so that answers can be ordered against requests."""

    def __init__(self) -> None:
        self.actions: deque[ActionRecord] = deque(maxlen=ACTIONS_KEPT)
        self._number = 0
        self._out: list[Command] = []
        self._under_way: dict[int, Command] = {}

    def stamp(self) -> int:
        self._number += 1
        return self._number

    def take(self, member: PoolMember) -> int:
        """Return a ticket for the member's one command. The answer to an earlier command will be ignored."""
        member.ticket = self.stamp()
        return member.ticket

    def send(self, command: Command) -> None:
        self._under_way[command.ticket] = command
        self._out.append(command)

    def answered(self, ticket: int) -> Command | None:
        """Return the command of `ticket` and end it; None if it has ended already."""
        return self._under_way.pop(ticket, None)

    def collect(self) -> list[Command]:
        """Return the commands sent since the last call."""
        out, self._out = self._out, []
        return out

    def act(self, now: float, action: str, reason: str, member: PoolMember | None = None) -> None:
        name, worker = (member.name, member.worker) if member is not None else (None, None)
        self.actions.append(ActionRecord(now, action, reason, name, worker))
