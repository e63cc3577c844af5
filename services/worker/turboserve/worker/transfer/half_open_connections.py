"""Connections whose peer has not proved anything yet: few, short, and cheap to lose.

A target that is what it says needs two frames to be admitted. Who floods the port pushes out the oldest of
its own address first, so that a stranger neither uses up descriptors nor keeps a target out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from turboserve import logs
from turboserve.worker.transfer import metrics
from turboserve.worker.transfer.errors import AuthenticationError

TOTAL_LIMIT = 256
ADDRESS_LIMIT = 128
REPORT_S = 10.0
"""The log tells of refused strangers this often at most."""

log = logs.get("transfer")


@dataclass(eq=False)
class _Connection:
    address: str
    abort: Callable[[], None]


class HalfOpenConnections:
    """Those of one worker. Belongs to the event loop's thread."""

    def __init__(
        self,
        total: int = TOTAL_LIMIT,
        per_address: int = ADDRESS_LIMIT,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._total, self._per_address = total, per_address
        self._open: list[_Connection] = []
        """The oldest first."""
        self._counts: Counter[str] = Counter()
        self._refused = 0
        self._told_at = float("-inf")

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def held(self, address: str, abort: Callable[[], None]) -> Iterator[None]:
        """While the body runs, the connection counts; `abort` is called if it has to make room."""
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
        """Count it, and tell of it now and then."""
        code = AuthenticationError.code
        metrics.broken.add(1, {"role": "source", "code": code})
        self._refused += 1
        now = self._now()
        if now - self._told_at >= REPORT_S:
            log.warning(
                "peers not admitted", count=self._refused, last=address, error=str(error) or repr(error)
            )
            self._refused, self._told_at = 0, now

    def _drop_oldest(self, address: str) -> None:
        oldest = next(one for one in self._open if one.address == address)
        self._forget(oldest)
        oldest.abort()

    def _forget(self, connection: _Connection) -> None:
        self._open.remove(connection)
        self._counts[connection.address] -= 1
        if not self._counts[connection.address]:
            del self._counts[connection.address]
