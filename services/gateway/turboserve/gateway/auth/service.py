"""API keys in memory, as hashes. A key names a tenant; a session belongs to the tenant that created it."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass

from turboserve.gateway.auth.hashing import KeySet, StoredKey

DEFAULT_TENANT = "default"


@dataclass(frozen=True)
class Identity:
    """The sender of a request."""

    tenant: str
    operator: bool
    """Whether the sender may control the pool and migrate every tenant's sessions."""
    key_id: str | None = None
    """Id of the sender's key. None: this gateway needs no key."""


class Keys:
    """Maps keys to identities. Without `key_set` no key is needed: every caller is the tenant `default`."""

    def __init__(self, key_set: KeySet | None, operators: Collection[str] = ()) -> None:
        self._operators = frozenset(operators)
        self._key_set: KeySet | None = None
        self._by_hash: dict[str, StoredKey] = {}
        self._by_id: dict[str, StoredKey] = {}
        if key_set is not None:
            self.replace(key_set)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return self._key_set is not None

    @property
    def stored(self) -> tuple[StoredKey, ...]:
        return () if self._key_set is None else self._key_set.keys

    @property
    def operators(self) -> tuple[str, ...]:
        """Tenants with at least one operator key."""
        return tuple(sorted({key.tenant for key in self.stored if self._identity(key).operator}))

    def replace(self, key_set: KeySet) -> None:
        """Replace all keys. An empty set admits no client."""
        self._key_set = key_set
        self._by_hash = {key.hash: key for key in key_set.keys}
        self._by_id = {key.id: key for key in key_set.keys}

    def identify(self, key: str | None) -> Identity | None:
        """Return the identity that `key` belongs to; None for an unknown key.

        The time taken reveals nothing about any key: the lookup is by a hash, which cannot be predicted
        without the salt.
        """
        if self._key_set is None:
            return Identity(DEFAULT_TENANT, not self._operators or DEFAULT_TENANT in self._operators)
        if not key:
            return None
        digest = self._key_set.hash_of(key)
        found = self._by_hash.get(digest)
        if found is None or not hmac.compare_digest(found.hash, digest):
            return None
        return self._identity(found)

    def holds(self, identity: Identity) -> bool:
        """Return whether the key of `identity` is still valid and has the same rights."""
        if self._key_set is None:
            return True
        found = self._by_id.get(identity.key_id or "")
        return found is not None and self._identity(found) == identity

    def _identity(self, key: StoredKey) -> Identity:
        return Identity(key.tenant, key.operator or key.tenant in self._operators, key.id)


def bearer(header: str | None) -> str | None:
    """Return the bearer token of an Authorization header, or None."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
