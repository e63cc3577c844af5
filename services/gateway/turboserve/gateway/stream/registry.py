"""Counts and limits the open streams of this process, in all and per tenant, and ends them at shutdown."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from turboserve.contracts.errors import TenantLimitError
from turboserve.gateway.problems.errors import TooManyStreamsError

RETRY_S = 5.0


class Streams:
    """The open streams. When the gateway stops, it sets `stopping`, and every stream ends."""

    def __init__(self, limit: int, per_tenant: int = 0) -> None:
        """`per_tenant`: maximum number of streams of one tenant; 0: no such limit."""
        self._limit, self._per_tenant = limit, per_tenant
        self._open: Counter[str] = Counter()
        self._none = asyncio.Event()
        self._none.set()
        self.stopping = asyncio.Event()

    def check(self, tenant: str) -> None:
        """Raise TooManyStreamsError at the limit of all streams, TenantLimitError at that of `tenant`."""
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
        """Count one stream of `tenant` during the block. Raises TooManyStreamsError and TenantLimitError."""
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
        """Ask all streams to end, and wait for them at most `within_s` seconds."""
        self.stopping.set()
        try:
            await asyncio.wait_for(self._none.wait(), within_s)
        except TimeoutError:
            return
