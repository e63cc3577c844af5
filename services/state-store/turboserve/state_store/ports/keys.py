"""The repository of API keys. For its errors, see `ports.sessions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from turboserve.contracts.keys import KeyLimits, KeyPage, KeyRecord, ListKeys, ValidKey
from turboserve.state_store.core.key_limits import KeyRates, KeyUsage
from turboserve.state_store.ports.records import KeyEdition


class KeyRepository(Protocol):
    async def edition(self) -> KeyEdition | None:
        """Return the salt and the version; None if there is no salt yet."""

    async def lock(self, salt: str) -> KeyEdition:
        """Lock the salt and the version. Creates a missing row with `salt` and version 0."""

    async def write_version(self, version: int) -> None:
        """Write the version; the caller holds its lock."""

    async def get(self, key: str) -> KeyRecord | None: ...

    async def insert(self, record: KeyRecord, key_hash: str) -> None:
        """Insert a key that is not revoked. Raises ConflictError if its id or its hash exists."""

    async def revoke(self, key: str, at: float) -> None:
        """Write when the key was revoked, unless it is revoked already."""

    async def change(self, key: str, limits: KeyLimits) -> None:
        """Write the limits of a key."""

    async def usage(self, key: str, day: int) -> KeyUsage:
        """Return the limits of a key, and what its sessions use, also in `day`.

        An unknown key has no limits. So has a key without limits, whose use is not counted.
        """

    async def lock_rates(self, key: str) -> KeyRates:
        """Lock the buckets of a key until the transaction ends. Creates a missing row."""

    async def write_rates(self, rates: KeyRates) -> None:
        """Write buckets; the caller holds their lock."""

    async def page(self, request: ListKeys) -> KeyPage: ...

    async def valid(self, now: float) -> list[ValidKey]:
        """Return the keys that are neither revoked nor expired, oldest first."""

    async def count_valid(self, now: float) -> int: ...

    async def note_uses(self, uses: Mapping[str, float], interval_s: float) -> None:
        """Write when keys were last used, except for a use less than `interval_s` after the written one."""
