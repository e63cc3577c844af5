"""The API keys of simulated tenants."""

from __future__ import annotations

import hashlib

from turboserve.gateway.auth.hashing import KeySet, StoredKey

SALT = "00" * 16


def key_of(tenant: str) -> str:
    """Return the API key of a tenant's users."""
    return f"simulated-key-of-{tenant}"


def key_set(tenants: tuple[str, ...]) -> KeySet | None:
    """Return the gateways' keys. None: a single tenant needs none."""
    if len(tenants) < 2:
        return None
    empty = KeySet(salt=SALT)
    keys = (
        StoredKey(
            id=hashlib.blake2b(tenant.encode(), digest_size=4).hexdigest(),
            tenant=tenant,
            hash=empty.hash_of(key_of(tenant)),
        )
        for tenant in tenants
    )
    return KeySet(salt=SALT, keys=tuple(keys))
