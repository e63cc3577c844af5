"""The repository of API keys. For its errors, see `ports.sessions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from turboserve.contracts.keys import KeyPage, KeyRecord, ListKeys, ValidKey
from turboserve.state_store.ports.records import KeyEdition


class KeyRepository(Protocol):
    async def edition(self) -> KeyEdition | None:
        """Return the salt and the version; None if there is no salt yet."""

    async def lock(self, salt: str) -> KeyEdition:
        """Lock the salt and the version. Creates a missing row with `salt` and version 0."""

    async def change(self, version: int) -> None:
        """Write the version; the caller holds its lock."""

    async def get(self, key: str) -> KeyRecord | None: ...

    async def insert(self, record: KeyRecord, key_hash: str) -> None:
        """Insert a key that is not revoked. Raises ConflictError if its id or its hash exists."""

    async def revoke(self, key: str, at: float) -> None:
        """Write when the key was revoked, unless it is revoked already."""

    async def page(self, request: ListKeys) -> KeyPage: ...

    async def valid(self, now: float) -> list[ValidKey]:
        """Return the keys that are neither revoked nor expired, oldest first."""

    async def count_valid(self, now: float) -> int: ...

    async def note_uses(self, uses: Mapping[str, float], interval_s: float) -> None:
        """Write when keys were last used, except for a use less than `interval_s` after the written one."""
