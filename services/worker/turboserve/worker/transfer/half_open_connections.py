"""Connections whose peer has not proved its key yet: few, short, and cheap to drop.

A legitimate target is admitted after two frames. A flood of connections replaces the oldest ones of its own
address first, so that an unknown peer neither exhausts descriptors nor keeps a target out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from turboserve import logs
from turboserve.telemetry_names import ERROR_TYPE, TRANSFER_ROLE
from turboserve.worker import metrics
from turboserve.worker.transfer.errors import AuthenticationError

TOTAL_LIMIT = 256
ADDRESS_LIMIT = 128
REPORT_S = 10.0
"""Shortest time between two log lines about refused peers, seconds."""

log = logs.get("transfer")


@dataclass(eq=False)
class _Connection:
    address: str
    abort: Callable[[], None]


class HalfOpenConnections:
    """The half-open connections of one worker. Use it on the event loop's thread."""

    def __init__(
        self,
        total: int = TOTAL_LIMIT,
        per_address: int = ADDRESS_LIMIT,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._total, self._per_address = total, per_address
        self._open: list[_Connection] = []
        """The connections, the oldest first."""
        self._counts: Counter[str] = Counter()
        self._refused = 0
        self._reported_at = float("-inf")

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def held(self, address: str, abort: Callable[[], None]) -> Iterator[None]:
        """Count a connection while the body runs. `abort` is called if the connection must make room."""
        if self._counts[address] >= self._per_address:
            self._drop_oldest(address)
        elif len(self._open) >= self._total:
            self._drop_oldest(self._counts.most_common(1)[0][0])
        mine = _Connection(address, abort)
        self._open.append(mine)
        self._counts[address] += 1
        try:
            yield
        finally:
            if mine in self._open:
                self._forget(mine)

    def refused(self, address: str, error: Exception) -> None:
        """Count a refused peer, and log the count at most every `REPORT_S`."""
        code = AuthenticationError.code
        metrics.transfers_broken.add(1, {TRANSFER_ROLE: "source", ERROR_TYPE: code})
        self._refused += 1
        now = self._now()
        if now - self._reported_at >= REPORT_S:
            log.warning(
                "peers not admitted", count=self._refused, last=address, error=str(error) or repr(error)
            )
            self._refused, self._reported_at = 0, now

    def _drop_oldest(self, address: str) -> None:
        oldest = next(one for one in self._open if one.address == address)
        self._forget(oldest)
        oldest.abort()

    def _forget(self, connection: _Connection) -> None:
        self._open.remove(connection)
        self._counts[connection.address] -= 1
        if not self._counts[connection.address]:
            del self._counts[connection.address]
