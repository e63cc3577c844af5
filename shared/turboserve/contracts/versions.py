"""The version of the schema set: every message carries it, and every reader checks it.

One version covers all messages, because services are released together. Its two numbers are:

- MAJOR: readers refuse messages of another MAJOR.
- MINOR: readers read every MINOR of their MAJOR. They ignore unknown fields. Missing fields have defaults.

The version is the first member of a message's JSON. It is therefore also in messages that are stored and read
later: in logs, in the outbox, and in Redis.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pydantic_core import from_json

MEMBER = "schema_version"
"""Name of the member. No contract has a field of this name."""
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")


class SchemaVersion(NamedTuple):
    """Version of a schema set."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @classmethod
    def parse(cls, text: object) -> SchemaVersion | None:
        """Return the version in `text`, or None if `text` is none."""
        found = _VERSION.fullmatch(text) if isinstance(text, str) else None
        return None if found is None else cls(int(found[1]), int(found[2]))


SCHEMA_VERSION = SchemaVersion(1, 2)
"""Version of this code's schema set. `docs/architecture/messaging.md` says when to raise which number."""

_STAMP = f'{{"{MEMBER}":"{SCHEMA_VERSION}"'
_SAME_MAJOR = f'{{"{MEMBER}":"{SCHEMA_VERSION.major}.'
_SAME_MAJOR_BYTES = _SAME_MAJOR.encode()


class SchemaVersionError(ValueError):
    """A message of another MAJOR, or without a version, which this process must not interpret."""

    def __init__(self, found: str | None, newer: bool) -> None:
        self.found = found
        """The message's version. None: the message has none, as before version 1.0."""
        self.newer = newer
        """Whether this process is the older of the two."""
        older = "this process" if newer else "the sender"
        super().__init__(
            f"schema version {found or 'none'}: this process reads {SCHEMA_VERSION.major}.x "
            f"(it has {SCHEMA_VERSION}); update {older}"
        )


def stamped(body: str) -> str:
    """Return the JSON object `body`, which has no whitespace, with the version of this code."""
    return f"{_STAMP}}}" if body == "{}" else f"{_STAMP},{body[1:]}"


def check(data: bytes | str) -> None:
    """Raise SchemaVersionError if `data` is a JSON object of another MAJOR, or without a valid version.

    Data that is no JSON object passes, because the contract's own validation refuses it.
    """
    # Every sender writes the version first, so that no message of the same MAJOR is parsed twice.
    if data.startswith(_SAME_MAJOR_BYTES) if isinstance(data, bytes) else data.startswith(_SAME_MAJOR):
        return
    try:
        message = from_json(data)
    except ValueError:
        return
    if not isinstance(message, dict):
        return
    found = SchemaVersion.parse(message.get(MEMBER))
    if found is None:
        raise SchemaVersionError(None, newer=False)
    if found.major != SCHEMA_VERSION.major:
        raise SchemaVersionError(str(found), newer=found.major > SCHEMA_VERSION.major)
