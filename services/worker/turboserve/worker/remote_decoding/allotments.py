"""How many sessions of a worker its decode workers decode in real time. Pure: time is an argument.

A decode worker carries a number of sessions in real time, and divides it among the workers that ask it by
their K. Each part is an *allotment*. A worker reports no more sessions than its decode workers allot to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

SILENT_S = 30.0
"""Time after which a silent worker has no allotment, seconds: a lost machine closes no connection."""
KEPT_S = 30.0
"""Time for which the allotment of a lost decode worker still counts, seconds. Most are replaced within it."""


@dataclass(frozen=True)
class _Asking:
    connection: object
    capacity: int
    heard_s: float


class DividedSessions:
    """The sessions of one decode worker, divided among the workers that ask it."""

    def __init__(self, sessions: int, name: str = "") -> None:
        """`name`: of the decode worker. It decides which of several equal workers get one session more."""
        self._name = name
        self.sessions = sessions
        """Sessions that the decode worker carries in real time."""
        self._asking: dict[str, _Asking] = {}

    def heard(self, worker: str, connection: object, capacity: int, now: float) -> None:
        """Note that a worker is there, on this connection. `capacity`: its K."""
        self._asking[worker] = _Asking(connection, capacity, now)

    def left(self, worker: str, connection: object) -> None:
        """Note that a connection is closed. The worker may have a newer one."""
        asking = self._asking.get(worker)
        if asking is not None and asking.connection is connection:
            del self._asking[worker]

    def allotment(self, worker: str, now: float) -> int:
        """Return the worker's part, in whole sessions. All parts together are as many as there are.

        What rounding leaves goes to the largest fractions, one session each. Many workers would lose most
        otherwise: of 11 sessions, eight workers would have one each.
        """
        present = {name: one.capacity for name, one in self._asking.items() if now - one.heard_s <= SILENT_S}
        if worker not in present:
            return 0
        total = sum(present.values())
        parts = {name: self.sessions * capacity // total for name, capacity in present.items()}
        left = self.sessions - sum(parts.values())
        first = sorted(
            present, key=lambda name: (-(self.sessions * present[name] % total), self._lot(name), name)
        )
        return parts[worker] + (worker in first[:left])

    def _lot(self, worker: str) -> int:
        return crc32(f"{worker} {self._name}".encode())


class AllottedSessions:
    """What the decode workers of one worker allot to it."""

    def __init__(self, addresses: Iterable[str], own: int, now: float) -> None:
        """`own`: sessions that the worker itself decodes, with caches of its own."""
        self._own = own
        self._began_s = now
        self._allotted: dict[str, int | None] = dict.fromkeys(addresses)
        """By address of the decode worker. None: not known yet."""
        self._carried: dict[str, tuple[str, int]] = {}
        """Address of each decode worker that is known → its id, and sessions that it carries over all
        workers."""
        self._lost_s: dict[str, float] = {}
        """Address of each decode worker that is lost → since when."""

    @property
    def known(self) -> bool:
        """Whether every decode worker has said how many sessions it allots."""
        return None not in self._allotted.values()

    def set_allotment(self, address: str, worker: str, sessions: int, carried: int = 0) -> None:
        """The decode worker of the id `worker` has said how many sessions it allots, and how many it carries
        over all workers.

        One of an earlier version does not say the latter: at least those that it allots.
        """
        self._allotted[address] = sessions
        self._carried[address] = worker, max(carried, sessions)
        self._lost_s.pop(address, None)

    def lost(self, address: str, now: float) -> None:
        """The connection to a decode worker is closed."""
        self._lost_s.setdefault(address, now)

    def limit(self, now: float) -> int | None:
        """Return the most sessions of the worker. None: the decode workers are not known yet."""
        starting = now - self._began_s <= KEPT_S
        if starting and not self.known:
            return None
        return max(self._own, sum(self._allotted[address] or 0 for address in self._counted(now)))

    def carried(self, now: float) -> dict[str, int] | None:
        """Return the sessions that each decode worker carries, by its id. None: they are not known yet."""
        if self.limit(now) is None:
            return None
        return dict(self._carried[address] for address in self._counted(now))

    def _counted(self, now: float) -> list[str]:
        """The decode workers that are known and not lost for long."""
        lost = self._lost_s
        return [each for each in self._carried if now - lost.get(each, now) <= KEPT_S]
