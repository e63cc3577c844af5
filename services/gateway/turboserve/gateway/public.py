"""What the whole public API shares: types of its schemas, and which of its responses last.

Request bodies refuse unknown fields, and times are RFC 3339 in UTC.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from turboserve.allocation.classes import SessionClass
from turboserve.contracts.public_types import TIME_SCHEMA
from turboserve.contracts.public_types import PublicActivity as PublicActivity
from turboserve.contracts.public_types import PublicMessage as PublicMessage
from turboserve.contracts.public_types import PublicOutput as PublicOutput
from turboserve.contracts.public_types import Timestamp as Timestamp
from turboserve.contracts.public_types import activity_of as activity_of
from turboserve.contracts.public_types import timestamp as timestamp
from turboserve.contracts.sessions import RateLeft

_FORM = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII | re.IGNORECASE)
_LASTING = ("/stream", "/stream.mp4", "/events")
_WHEP = re.compile(r"/v1/sessions/[^/]+/whep(?:/[^/]+)?")


ModelName = Annotated[str, BeforeValidator(lambda name: SessionClass.of_name(name).model)]
"""Name of a model in an answer, without the frame size that the name of a class may end in."""


def class_members(name: str | None) -> dict[str, str | int | None]:
    """Return `model`, `width` and `height` of an answer about a class of sessions. None: of no class."""
    if name is None:
        return {"model": None, "width": None, "height": None}
    found = SessionClass.of_name(name)
    return {"model": found.model, "width": found.width or None, "height": found.height or None}


NewestEvent = Annotated[
    int,
    Field(
        description="Number (`sequence`) of the session's newest event that this answer reflects. Of two "
        "answers, that with the lower number is older.",
        examples=[4],
    ),
]


class PublicInput(BaseModel):
    """Base of all objects in request bodies. Unknown fields and other types than declared are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _read(value: object) -> datetime:
    if not isinstance(value, str) or not _FORM.fullmatch(value):
        raise ValueError("must be a time as in RFC 3339, such as 2026-11-22T21:04:05Z")
    time = datetime.fromisoformat(value.upper())
    if time < datetime.fromtimestamp(0, UTC):
        raise ValueError("must not be before 1970")
    return time


InputTime = Annotated[AwareDatetime, BeforeValidator(_read), WithJsonSchema(TIME_SCHEMA)]
"""A time in a request body: RFC 3339 with an offset, not before 1970."""


def rate_headers(rates: Iterable[RateLeft]) -> dict[str, str]:
    """Return the headers of limits per time, as draft-ietf-httpapi-ratelimit-headers-10 has them."""
    known = list(rates)
    if not known:
        return {}
    return {
        "RateLimit-Policy": ", ".join(
            f'"{one.name}";q={one.limit:.0f};w={one.window_s:.0f}' for one in known
        ),
        "RateLimit": ", ".join(
            f'"{one.name}";r={math.floor(one.left)};t={math.ceil(one.reset_s)}' for one in known
        ),
    }


def takes_head(path: str) -> bool:
    """Return whether the response at `path` is finite. Only finite responses support HEAD."""
    return not path.endswith(_LASTING)


def is_whep(path: str) -> bool:
    """Return whether WebRTC streams are opened and closed at `path`."""
    return _WHEP.fullmatch(path) is not None


def takes_ticket(path: str) -> bool:
    """Return whether a ticket in the query is accepted at `path`: wherever a stream is opened."""
    return not takes_head(path) or is_whep(path)
