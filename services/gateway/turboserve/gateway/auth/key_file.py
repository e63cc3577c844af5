"""The file of hashed keys, `TURBOSERVE_API_KEYS_FILE`. See docs/how-to/api-keys.md for its format.

A user who can write the file can add keys, and a user who can read it learns the tenants. So only its owner
may have access. Every change replaces the whole file: a reader gets the old or the new file, never a part.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError

from turboserve.gateway.auth.hashing import KeySet, StoredKey, new_key

FILE_BYTES_LIMIT = 8 << 20


class KeyFileError(ValueError):
    """The file of keys cannot be used. The message names the file and the remedy."""


class KeyFile(KeySet):
    """The content of the file, as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1


def read(path: Path) -> KeyFile:
    """Read the keys in the file `path`. Raises KeyFileError if it is missing, open to others or invalid."""
    try:
        with path.open("rb") as file:
            # Check the opened file: another file may have this name by now.
            _check_mode(path, os.fstat(file.fileno()))
            text = file.read(FILE_BYTES_LIMIT + 1)
    except OSError as error:
        raise KeyFileError(
            f"{path}: {error.strerror}; `turboserve keys add TENANT` creates the file"
        ) from None
    if len(text) > FILE_BYTES_LIMIT:
        raise KeyFileError(f"{path}: larger than {FILE_BYTES_LIMIT} bytes")
    try:
        found = KeyFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise KeyFileError(f"{path}: {where}: {first['msg']}") from None
    for name, values in (
        ("id", [key.id for key in found.keys]),
        ("hash", [key.hash for key in found.keys]),
    ):
        if len(set(values)) < len(values):
            raise KeyFileError(f"{path}: two keys have the same {name}")
    return found


def add(
    path: Path,
    tenant: str,
    *,
    operator: bool = False,
    scopes: tuple[str, ...] | None = None,
    expires_at: float | None = None,
) -> tuple[StoredKey, str]:
    """Add a new key of `tenant`, and make the file if there is none.

    Returns:
        The stored record and the key itself, which cannot be shown again.

    Raises:
        KeyFileError: The file cannot be read or written.
        ValidationError: `tenant` is no id.
    """
    key_id, key = new_key()

    def with_new(old: KeyFile) -> KeyFile:
        record = StoredKey(
            id=key_id,
            tenant=tenant,
            operator=operator,
            scopes=scopes,
            expires_at=expires_at,
            created_at=datetime.now(UTC).replace(microsecond=0),
            hash=old.hash_of(key),
        )
        return KeyFile(salt=old.salt, keys=(*old.keys, record))

    return _change(path, with_new, create=True).keys[-1], key


def revoke(path: Path, key_id: str) -> StoredKey:
    """Remove the key `key_id`; gateways refuse it within a second or two. Raises KeyFileError."""
    removed: list[StoredKey] = []

    def without(old: KeyFile) -> KeyFile:
        removed.extend(key for key in old.keys if key.id == key_id)
        if not removed:
            raise KeyFileError(f"{path}: there is no key {key_id}; `turboserve keys list` shows them")
        return KeyFile(salt=old.salt, keys=tuple(key for key in old.keys if key.id != key_id))

    _change(path, without, create=False)
    return removed[0]


def _change(path: Path, change: Callable[[KeyFile], KeyFile], *, create: bool) -> KeyFile:
    try:
        with _locked(path):
            new = change(KeyFile() if create and not path.exists() else read(path))
            _replace(path, new.model_dump_json(indent=1, exclude_none=True).encode() + b"\n")
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    return new


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The lock is on the folder, because each change replaces the file.
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    # mkstemp creates the file with mode 0600.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with suppress(FileNotFoundError):
                before = path.stat()
                # An administrator who adds a key must not take the file from the user who runs the gateway.
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check_mode(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"{path}: is not a regular file")
    if found.st_mode & 0o077:
        raise KeyFileError(
            f"{path}: has mode {stat.S_IMODE(found.st_mode):04o}, so others may use it: chmod 600 {path}"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise KeyFileError(
            f"{path}: belongs to user {found.st_uid}: its owner must be this process ({os.geteuid()}) or root"
        )
