"""The repository of links and signing keys. For its errors, see `ports.sessions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from turboserve.contracts.links import LinkRecord, SigningKey
from turboserve.state_store.core.links import LinkCounts
from turboserve.state_store.ports.records import SigningEdition


class LinkRepository(Protocol):
    async def edition(self) -> SigningEdition | None:
        """Return the database's name and the version; None if there is no name yet."""

    async def lock(self, database: str) -> SigningEdition:
        """Lock the name and the version. Creates a missing row with `database` and version 0."""

    async def change(self, version: int) -> None:
        """Write the version; the caller holds its lock."""

    async def keys(self) -> list[SigningKey]:
        """Return the signing keys, oldest first."""

    async def insert_key(self, key: SigningKey) -> None: ...

    async def delete_keys(self, ids: Iterable[str]) -> None: ...

    async def get(self, link: str) -> LinkRecord | None: ...

    async def insert(self, record: LinkRecord) -> None:
        """Insert a link that is not revoked. Raises ConflictError if its id exists."""

    async def revoke(self, link: str, at: float) -> None:
        """Write when the link was revoked."""

    async def of_session(self, session: str, now: float) -> list[LinkRecord]:
        """Return the session's links that have not expired, newest first."""

    async def counts(self, session: str, tenant: str, now: float) -> LinkCounts: ...

    async def revoked(self, now: float) -> list[str]:
        """Return the ids of the links that are revoked and have not expired."""

    async def delete_expired(self, before: float) -> None:
        """Delete the links that expired before this time."""
