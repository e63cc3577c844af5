"""What every message shares: it is frozen, it carries a schema version, it ignores what it does not know."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    StringConstraints,
)

ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
"""What may stand as one token of a NATS subject: no dot, no space, no wildcard."""

Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")

NUMBER_LIMIT = 2**53 - 1
TEXT_LIMIT = 65_536
NOTE_LIMIT = 1_000


def storable(text: str) -> str:
    """`text`, if Postgres can store it and UTF-8 encode it, and it is no longer than any has to be. Raises
    ValueError.
    """
    if len(text) > TEXT_LIMIT:
        raise ValueError(f"must have at most {TEXT_LIMIT} characters")
    found = _UNSTORABLE.search(text)
    if found is not None:
        name = "NUL" if found.group() == "\0" else f"U+{ord(found.group()):04X}, half of a surrogate pair"
        raise ValueError(f"must not contain the character {name}")
    return text


def _replaced(text: object) -> object:
    if not isinstance(text, str):
        return text
    whole = _UNSTORABLE.sub("\ufffd", text)
    return whole if len(whole) <= NOTE_LIMIT else f"{whole[: NOTE_LIMIT - 1]}…"


Number = Annotated[int, Field(ge=-NUMBER_LIMIT, le=NUMBER_LIMIT)]
"""A whole number that JSON, Lua, Postgres and a float all keep exactly, also when 1 is added to it."""
Count = Annotated[int, Field(ge=0, le=NUMBER_LIMIT)]
"""A `Number` of things, or of the position of one."""
# Without Field: of two bounds of one kind, one in the annotation and one in the field, the first would count.
Text = Annotated[str, AfterValidator(storable)]
"""What people write, at most `TEXT_LIMIT` characters. NUL, which Postgres does not store, and lone
surrogates, which UTF-8 does not encode, are refused."""
Note = Annotated[str, BeforeValidator(_replaced)]
"""What programs write: reasons. The same characters are replaced and what is over `NOTE_LIMIT` characters is
cut, since a report must not fail because of a file's name in an exception."""
UnixSeconds = Annotated[float, Field(ge=0)]
"""Wall-clock time, seconds since the epoch. Only shown to people and never compared across machines."""

Secret = Annotated[SecretStr, PlainSerializer(SecretStr.get_secret_value, return_type=str, when_used="json")]
"""Sent as it is, and shown as asterisks wherever an object is printed or logged."""

# Without its anchors: in Python `$` also stands before a line end at the end.
_ID = re.compile(ID_PATTERN.strip("^$"))


class Contract(BaseModel):
    """Base of all events, commands, records and requests that cross a process boundary.

    Unknown fields are ignored, so that a newer service may add one before the older ones are replaced.
    A change that an old reader would misread raises `VERSION`, and readers refuse what they cannot read.

    Every field is bounded: numbers are finite and at most `NUMBER_LIMIT`, texts hold no NUL and are at most
    `TEXT_LIMIT` long, unless the field says otherwise. What a sender with one service's credentials makes up
    then breaks neither a database nor the arithmetic of a reader.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    VERSION: ClassVar[int] = 1

    def to_bytes(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.model_validate_json(data)


def is_id(text: str) -> bool:
    """Whether `text` can stand as a session, worker or event id."""
    return _ID.fullmatch(text) is not None
