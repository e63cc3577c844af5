"""The port of the hot store: keys with a time to live, all of which may be lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

DEADLINE_S = 0.25
"""Time that a client waits for the answer to one command, seconds."""
RETRIES = 1
"""Immediate retries: only using a connection shows that it belonged to an earlier server."""


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

        Chunks up to `index - kept` are dropped, except chunk 0. The first value of a later epoch also drops
        the chunks after `index`. A value of an earlier epoch only fills a gap among the `kept` chunks before
        the first chunk of the latest epoch.
        """

    async def latents(self, key: str, index: int) -> bytes | None:
        """Return what is kept of the chunk, or None."""

    async def write(self, hashes: Mapping[str, Mapping[str, float]], *, ttl_s: int) -> None:
        """Set these fields of these keys in one round trip. Other fields stay."""

    async def read(self, keys: Sequence[str], fields: Sequence[str]) -> list[list[float | None]]:
        """Read these fields of these keys in one round trip."""

    async def first(self, key: str, value: float, *, ttl_s: int) -> float:
        """Set `key` to `value` if it is not set. Returns the value of `key`."""

    async def run_id(self) -> str:
        """Return the id of the server's current run, which changes with each start."""

    async def delete(self, key: str) -> None:
        """Delete what `keep_latents`, `write` or `first` stored under `key`."""

    async def probe(self) -> None:
        """Write something, to check that the store accepts writes."""

    async def close(self) -> None:
        """Close all connections."""
