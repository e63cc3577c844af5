"""API keys and their hashes. A key is shown once, when it is made; only its hash is kept."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints

from turboserve.contracts.base import Id
from turboserve.contracts.keys import Scope, ScopeName
from turboserve.gateway.auth.grants import GrantKind, kind_of

PREFIX = "ts_"
"""Prefix of every key made here, so that scanners find a key that was published by mistake."""
SALT_BYTES = 16
HASH_BYTES = 32
KEY_LENGTHS = (16, 512)
"""Minimum and maximum characters of a key. A fast hash does not slow guessing, so keys must be long."""

_PERSON = b"turboserve-key"
_ID_BYTES, _SECRET_BYTES = 4, 24
_TEXT = re.compile(r"[\x21-\x7e]+")

TENANT_SCOPES: frozenset[str] = frozenset({Scope.SESSIONS_READ, Scope.SESSIONS_WRITE})
"""Scopes of a key without the field `scopes` that is not an operator's."""
OPERATOR_SCOPES: frozenset[str] = TENANT_SCOPES | {Scope.POOL_WRITE}
"""Scopes of an operator's key, and of every caller of a gateway without keys."""


def _hex(length_bytes: int) -> StringConstraints:
    return StringConstraints(pattern=rf"^[0-9a-f]{{{2 * length_bytes}}}$")


class StoredKey(BaseModel):
    """One API key without its text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Id
    """Id of the key. The text of a key from `new_key` contains it, for people: `ts_ID_…`."""
    tenant: Id
    operator: bool = False
    """Whether the key has the scope `pool:write` besides those of a tenant."""
    scopes: tuple[ScopeName, ...] | None = None
    """Scopes of the key. None: `operator` decides."""
    created_at: AwareDatetime | None = None
    expires_at: float | None = None
    """Unix seconds. None: the key does not expire."""
    hash: Annotated[str, _hex(HASH_BYTES)]

    @property
    def effective_scopes(self) -> frozenset[str]:
        if self.scopes is not None:
            return frozenset(self.scopes)
        return OPERATOR_SCOPES if self.operator else TENANT_SCOPES


class KeySet(BaseModel):
    """Keys that were hashed with one salt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    salt: Annotated[str, _hex(SALT_BYTES)] = Field(default_factory=lambda: secrets.token_hex(SALT_BYTES))
    keys: tuple[StoredKey, ...] = ()

    def hash_of(self, key: str) -> str:
        """Return the hash of `key` under this set's salt, in hexadecimal digits.

        The hash is keyed BLAKE2b, which is fast. A slow hash would only protect keys that can be guessed, and
        keys are random: `new_key` makes them from 192 random bits.
        """
        text = key.encode(errors="replace")
        salt = bytes.fromhex(self.salt)
        return hashlib.blake2b(text, digest_size=HASH_BYTES, key=salt, person=_PERSON).hexdigest()


def new_key() -> tuple[str, str]:
    """Return the id and the text of a new key, `ts_ID_SECRET`."""
    key_id = new_id()
    return key_id, key_text(key_id)


def key_text(key_id: str) -> str:
    """Return the text of a new key with this id."""
    return f"{PREFIX}{key_id}_{secrets.token_hex(_SECRET_BYTES)}"


def new_id() -> str:
    """Return an id for a key whose text contains none."""
    return secrets.token_hex(_ID_BYTES)


def check_key(key: str) -> None:
    """Raise ValueError, without the key in it, if `key` cannot be sent in a header or is too short."""
    least, most = KEY_LENGTHS
    if not least <= len(key) <= most:
        raise ValueError(
            f"a key has {len(key)} characters: it must have {least} to {most} "
            f"(`openssl rand -hex 24` makes one)"
        )
    if kind_of(key) is not None:
        raise ValueError(f"a key must not begin as a link or ticket does: {', '.join(GrantKind)}")
    if not _TEXT.fullmatch(key):
        raise ValueError("a key has characters that a header cannot carry: use visible ASCII")
