"""The base class of all messages: frozen, with a schema version, ignoring unknown fields."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Self

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

from turboserve.contracts import versions

ID_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
"""Pattern of one token of a NATS subject: no dot, no space, no wildcard."""

Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")

NUMBER_LIMIT = 2**53 - 1
TEXT_LIMIT = 65_536
NOTE_LIMIT = 1_000


def storable(text: str) -> str:
    """Return `text` if it can be stored. Raises ValueError otherwise.

    Postgres must be able to store `text`, UTF-8 to encode it, and it has at most `TEXT_LIMIT` characters.
    """
    if len(text) > TEXT_LIMIT:
        raise ValueError(f"must have at most {TEXT_LIMIT} characters")
    if text.isascii() and "\0" not in text:
        # As nearly all texts are. A search looks at each character.
        return text
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
"""An integer that JSON, Lua, Postgres and a float all represent exactly, even after adding 1."""
Count = Annotated[int, Field(ge=0, le=NUMBER_LIMIT)]
"""A `Number` that counts things, or that is the position of one."""
# No `Field` here: of two bounds of one kind, in the annotation and in the field, only the first would apply.
Text = Annotated[str, AfterValidator(storable)]
"""Text written by people, at most `TEXT_LIMIT` characters. NUL and lone surrogates are refused: Postgres does
not store NUL, and UTF-8 does not encode lone surrogates."""
Traceparent = Annotated[Text, Field(max_length=64)]
"""Context of a span, as in the header `traceparent` of W3C Trace Context. Readers ignore any other text."""
Note = Annotated[str, BeforeValidator(_replaced)]
"""Text written by programs, such as reasons. Characters that `Text` refuses are replaced, and the text is cut
to `NOTE_LIMIT` characters: a report must not fail because of a file's name in an exception."""
UnixSeconds = Annotated[float, Field(ge=0)]
"""Wall-clock time, seconds since the Unix epoch. Only shown to people, never compared across machines."""

Secret = Annotated[SecretStr, PlainSerializer(SecretStr.get_secret_value, return_type=str, when_used="json")]
"""Sent in plain text, and shown as asterisks wherever an object is printed or logged."""

_set = object.__setattr__

# Without its anchors, since `$` in Python also matches before a final line break.
_ID = re.compile(ID_PATTERN.strip("^$"))


class Contract(BaseModel):
    """Base of all events, commands, records and requests that cross a process boundary.

    `to_bytes` and `to_text` put the schema version into the message, and `from_bytes` and `from_text` check
    it (`turboserve.contracts.versions`). Unknown fields are ignored, so that a newer service may add one
    before the older ones are replaced.

    Every field is bounded, so that a malicious sender with one service's credentials breaks neither a
    database nor the arithmetic of a reader. Unless the field says otherwise, numbers are finite and at most
    `NUMBER_LIMIT`, and texts contain no NUL and are at most `TEXT_LIMIT` characters long.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if cls.__private_attributes__ or cls.model_config.get("extra") == "allow":
            raise TypeError(f"{cls.__name__}: a contract has no private and no extra fields; see __copy__")

    def __copy__(self) -> Self:
        # As pydantic's, in a third of the time: private and extra fields are not copied. Hot rows are copied
        # with each change.
        copied = type(self).__new__(type(self))
        _set(copied, "__dict__", self.__dict__.copy())
        _set(copied, "__pydantic_extra__", None)
        _set(copied, "__pydantic_fields_set__", self.__pydantic_fields_set__.copy())
        _set(copied, "__pydantic_private__", None)
        return copied

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """As the constructor, in two thirds of its time. Each chunk needs some messages."""
        message: Self = cls.__pydantic_validator__.validate_python(fields)
        return message

    @classmethod
    def of_valid_fields(cls, fields: dict[str, Any]) -> Self:
        """Return a message of fields that are known to be valid, and of defaults, which are shared.

        As `model_construct`, without its look at each field.
        """
        message = cls.__new__(cls)
        _set(message, "__dict__", _defaults(cls) | fields)
        _set(message, "__pydantic_extra__", None)
        _set(message, "__pydantic_fields_set__", set(fields))
        _set(message, "__pydantic_private__", None)
        return message

    def to_text(self) -> str:
        """Return the message as JSON with its schema version, for a header."""
        # The same as `model_dump_json`, without its twenty arguments.
        return versions.stamped(self.__pydantic_serializer__.to_json(self, exclude_none=True).decode())

    def to_bytes(self) -> bytes:
        """As `to_text`, for the body of a message."""
        return self.to_text().encode()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse a header. Raises as `from_bytes`."""
        versions.check(text)
        return cls.model_validate_json(text)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the body of a message.

        Raises SchemaVersionError for another MAJOR, pydantic's ValidationError for invalid contents.
        """
        versions.check(data)
        return cls.model_validate_json(data)


def is_id(text: str) -> bool:
    """Whether `text` is valid as the id of a session, worker or event."""
    return _ID.fullmatch(text) is not None


@cache
def _defaults(kind: type[Contract]) -> dict[str, Any]:
    fields = kind.model_fields.items()
    return {
        name: each.get_default(call_default_factory=True) for name, each in fields if not each.is_required()
    }
