"""API keys and their hashes. A key is shown once, when it is made; only its hash is kept."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints

from turboserve.contracts.base import Id

PREFIX = "ts_"
"""What every key made here begins with, so that scanners find one that was published by mistake."""
SALT_BYTES = 16
HASH_BYTES = 32
KEY_LENGTHS = (16, 512)
"""Characters of a key: a shorter one can be guessed, since a fast hash is no help against guessing."""

_PERSON = b"turboserve-key"
_ID_BYTES, _SECRET_BYTES = 4, 24
_TEXT = re.compile(r"[\x21-\x7e]+")

KeyId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}$")]


def _hex(length_bytes: int) -> StringConstraints:
    return StringConstraints(pattern=rf"^[0-9a-f]{{{2 * length_bytes}}}$")


class StoredKey(BaseModel):
    """One key without its text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: KeyId
    """Stands in the key's own text too, for people: `ts_ID_…`."""
    tenant: Id
    operator: bool = False
    """Whether its holder may give orders about the pool and move anybody's sessions."""
    created_at: AwareDatetime | None = None
    hash: Annotated[str, _hex(HASH_BYTES)]


class KeySet(BaseModel):
    """Keys that were hashed with one salt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    salt: Annotated[str, _hex(SALT_BYTES)] = Field(default_factory=lambda: secrets.token_hex(SALT_BYTES))
    keys: tuple[StoredKey, ...] = ()

    def hash_of(self, key: str) -> str:
        """The hash of `key` under this set's salt, in hexadecimal digits.

        Keyed BLAKE2b, as fast as it is: keys are random, 192 bits where this module made them, so that there
        is nothing to guess which a slow hash would protect.
        """
        text = key.encode(errors="replace")
        salt = bytes.fromhex(self.salt)
        return hashlib.blake2b(text, digest_size=HASH_BYTES, key=salt, person=_PERSON).hexdigest()


def new_key() -> tuple[str, str]:
    """A new key's id and its text, `ts_ID_SECRET`."""
    key_id = secrets.token_hex(_ID_BYTES)
    return key_id, f"{PREFIX}{key_id}_{secrets.token_hex(_SECRET_BYTES)}"


def new_id() -> str:
    """An id for a key whose text does not carry one."""
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
