"""The hot store as the services see it: keys with a time to live, all of which may be lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

DEADLINE_S = 0.25
"""A client waits for so long for the answer to one command."""
RETRIES = 1
"""At once: a connection that an earlier server left behind is found out by using it."""


class HotUnavailableError(Exception):
    """The hot store does not answer."""


class HotRefusedError(Exception):
    """The hot store answers and refuses, for example a write while its disk or memory is full."""


class HotStore(Protocol):
    """Redis. All methods raise `HotUnavailableError` and `HotRefusedError`. Times to live are in seconds."""

    async def keep_latents(
        self, key: str, index: int, epoch: int, value: bytes, *, kept: int, ttl_s: int
    ) -> None:
        """Keep `value` as chunk `index` of `key`, atomically, if no value of a later epoch was kept before.

        Chunks up to `index - kept` are dropped, except chunk 0; with the first value of a later epoch, also
        those behind `index`. A value of an earlier epoch only fills a gap among the `kept` chunks before the
        first of the latest.
        """

    async def latents(self, key: str, index: int) -> bytes | None:
        """What is kept of the chunk, if anything."""

    async def write(self, hashes: Mapping[str, Mapping[str, float]], *, ttl_s: int) -> None:
        """Set these fields of these keys in one round trip; other fields stay."""

    async def read(self, keys: Sequence[str], fields: Sequence[str]) -> list[list[float | None]]:
        """These fields of these keys in one round trip."""

    async def first(self, key: str, value: float, *, ttl_s: int) -> float:
        """Set `key` to `value` if it is not set; what it is set to."""

    async def run_id(self) -> str:
        """Another one after each start of the server."""

    async def delete(self, key: str) -> None:
        """Delete what `keep_latents`, `write` or `first` have kept under `key`."""

    async def probe(self) -> None:
        """Write something, for readiness."""

    async def close(self) -> None:
        """Give up all connections."""
