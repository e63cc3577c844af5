"""Ids that all repeats of a request have in common: they are derived from its Idempotency-Key."""

from __future__ import annotations

import hashlib

from turboserve.gateway.problems.errors import KeyReusedError
from turboserve.ids import new_id

ID_DIGITS = 32


def digest(*parts: str) -> str:
    """Return 64 hexadecimal digits. The first part is the purpose, so that no two purposes share a digest."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def id_of(prefix: str, *scope: str, repeat: str | None, purpose: str | None = None) -> str:
    """Return the id of what a request creates: a new one, or that of all requests with the key `repeat`.

    `scope`: within what the key is unique. `purpose`: that of the digest; by default, the prefix.
    """
    if repeat is None:
        return new_id(prefix)
    return f"{prefix}_{digest(purpose or prefix, *scope, repeat)[:ID_DIGITS]}"


def key_reused() -> KeyReusedError:
    """Return the error of a repeat that is another request."""
    return KeyReusedError("this Idempotency-Key was used with a different request", field="Idempotency-Key")
