"""API keys and their hashes. A key is shown once, when it is made; only its hash is kept."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints

from turboserve.contracts.base import Id

PREFIX = "ts_"
"""Prefix of every key made here, so that scanners find a key that was published by mistake."""
SALT_BYTES = 16
HASH_BYTES = 32
KEY_LENGTHS = (16, 512)
"""Minimum and maximum characters of a key. A fast hash does not slow guessing, so keys must be long."""

_PERSON = b"turboserve-key"
_ID_BYTES, _SECRET_BYTES = 4, 24
_TEXT = re.compile(r"[\x21-\x7e]+")

KeyId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}$")]


def _hex(length_bytes: int) -> StringConstraints:
    return StringConstraints(pattern=rf"^[0-9a-f]{{{2 * length_bytes}}}$")


class StoredKey(BaseModel):
    """One API key without its text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: KeyId
    """Id of the key. The text of a key from `new_key` contains it, for people: `ts_ID_…`."""
    tenant: Id
    operator: bool = False
    """Whether the key's holder may control the pool and migrate every tenant's sessions."""
    created_at: AwareDatetime | None = None
    hash: Annotated[str, _hex(HASH_BYTES)]


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
    key_id = secrets.token_hex(_ID_BYTES)
    return key_id, f"{PREFIX}{key_id}_{secrets.token_hex(_SECRET_BYTES)}"


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
    if not _TEXT.fullmatch(key):
        raise ValueError("a key has characters that a header cannot carry: use visible ASCII")
