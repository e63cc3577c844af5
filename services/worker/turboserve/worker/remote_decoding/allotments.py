"""How many sessions of a worker its decode workers decode in real time. Pure: time is an argument.

A decode worker carries a number of sessions in real time, and divides it among the workers that ask it by
their K. Each part is an *allotment*. A worker reports no more sessions than its decode workers allot to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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

    def __init__(self, sessions: int) -> None:
        """`sessions`: that the decode worker carries in real time."""
        self._sessions = sessions
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
        """Return the worker's part, in whole sessions. All parts together are no more than there are."""
        present = {name: one for name, one in self._asking.items() if now - one.heard_s <= SILENT_S}
        if worker not in present:
            return 0
        return self._sessions * present[worker].capacity // sum(one.capacity for one in present.values())


class AllottedSessions:
    """What the decode workers of one worker allot to it."""

    def __init__(self, addresses: Iterable[str], own: int, now: float) -> None:
        """`own`: sessions that the worker itself decodes, with caches of its own."""
        self._own = own
        self._began_s = now
        self._allotted: dict[str, int | None] = dict.fromkeys(addresses)
        """By address of the decode worker. None: not known yet."""
        self._lost_s: dict[str, float] = {}
        """Address of each decode worker that is lost → since when."""

    @property
    def known(self) -> bool:
        """Whether every decode worker has said how many sessions it allots."""
        return None not in self._allotted.values()

    def set_allotment(self, address: str, sessions: int) -> None:
        """A decode worker has said how many sessions it allots."""
        self._allotted[address] = sessions
        self._lost_s.pop(address, None)

    def lost(self, address: str, now: float) -> None:
        """The connection to a decode worker is closed."""
        self._lost_s.setdefault(address, now)

    def limit(self, now: float) -> int | None:
        """Return the most sessions of the worker. None: the decode workers are not known yet."""
        starting = now - self._began_s <= KEPT_S
        if starting and not self.known:
            return None
        counted = (
            sessions
            for address, sessions in self._allotted.items()
            if sessions is not None and now - self._lost_s.get(address, now) <= KEPT_S
        )
        return max(self._own, sum(counted))
