"""Tracks the core's commands and actions, and the workers that the store must learn are gone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cachetools import FIFOCache

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


REMEMBERED = 10_000


@dataclass
class _GoneReport:
    reason: str
    due_at: float = 0.0
    under_way: bool = False


class GoneNotifier:
    """Repeats each declaration until it is acknowledged, and remembers gone workers."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._open: dict[str, _GoneReport] = {}
        self._gone_at: FIFOCache[str, int] = FIFOCache(REMEMBERED)

    def add(self, worker: str, reason: str, stamp: int) -> None:
        """Declare `worker` gone. Another call after the acknowledgment declares it again."""
        self._gone_at[worker] = stamp
        self._open.setdefault(worker, _GoneReport(reason))

    def gone_after(self, worker: str, stamp: int) -> bool:
        """Whether `add` noted the worker's end after `stamp`."""
        return self._gone_at.get(worker, -1) > stamp

    def due(self, now: float) -> list[tuple[str, str]]:
        """Return workers and reasons to declare now. Each is under way until `answered`."""
        found = []
        for worker, notice in self._open.items():
            if not notice.under_way and notice.due_at <= now:
                notice.under_way = True
                found.append((worker, notice.reason))
        return found

    def answered(self, worker: str, done: bool, now: float) -> None:
        notice = self._open.get(worker)
        if notice is None:
            return
        if done:
            del self._open[worker]
        else:
            notice.under_way, notice.due_at = False, now + self._retry_s
