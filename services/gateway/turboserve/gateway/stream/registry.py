"""Open streams of this process: how many there may be, in all and of one tenant, and their orderly end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from turboserve.contracts.errors import TenantLimitError
from turboserve.gateway.problems.errors import TooManyStreamsError

RETRY_S = 5.0


class Streams:
    """Counts streams. When the gateway stops, `stopping` is set and every stream says goodbye."""

    def __init__(self, limit: int, per_tenant: int = 0) -> None:
        """`per_tenant`: streams of one tenant at most; 0: as many as there are."""
        self._limit, self._per_tenant = limit, per_tenant
        self._open: Counter[str] = Counter()
        self._none = asyncio.Event()
        self._none.set()
        self.stopping = asyncio.Event()

    def check(self, tenant: str) -> None:
        """Raises TooManyStreamsError when there is no place, and TenantLimitError when there is none for this
        tenant."""
        if self._per_tenant and self._open[tenant] >= self._per_tenant:
            raise TenantLimitError(
                f"this tenant has {self._per_tenant} streams at this gateway, which is all that one may have",
                field="tenant_streams",
                limit=self._per_tenant,
                retry_after_s=RETRY_S,
            )
        if self._open.total() >= self._limit:
            raise TooManyStreamsError(
                "this gateway serves no more streams",
                field="streams",
                limit=self._limit,
                retry_after_s=RETRY_S,
            )

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """A stream's place, for as long as it is open. Raises TooManyStreamsError and TenantLimitError."""
        self.check(tenant)
        self._open[tenant] += 1
        self._none.clear()
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
            if not self._open:
                self._none.set()

    async def close(self, within_s: float = 2.0) -> None:
        """Ask all streams to end, and wait for them."""
        self.stopping.set()
        try:
            await asyncio.wait_for(self._none.wait(), within_s)
        except TimeoutError:
            return
