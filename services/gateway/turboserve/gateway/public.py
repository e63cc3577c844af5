"""What the whole public API shares: types of its schemas, and which of its responses last.

Request bodies refuse unknown fields, and times are RFC 3339 in UTC.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from turboserve.contracts.sessions import Activity, RateLeft, SessionRecord

_LATEST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
_LATEST_S = _LATEST.timestamp()
_FORM = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII | re.IGNORECASE)
_LASTING = ("/stream", "/stream.mp4", "/events")
_WHEP = re.compile(r"/v1/sessions/[^/]+/whep(?:/[^/]+)?")


class PublicInput(BaseModel):
    """Base of all objects in request bodies. Unknown fields and other types than declared are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class PublicOutput(BaseModel):
    """Base of all objects in answers. Fields of a bus contract that are not declared here are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def timestamp(unix_s: float) -> datetime:
    """Convert Unix seconds. Times after the year 9999, which RFC 3339 cannot express, become its last one."""
    return datetime.fromtimestamp(unix_s, UTC) if unix_s < _LATEST_S else _LATEST


def _time_of(value: object) -> object:
    return timestamp(value) if isinstance(value, int | float) else value


def _written(time: datetime) -> str:
    utc = time if time.tzinfo is UTC else time.astimezone(UTC)
    return f"{utc.replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def _read(value: object) -> datetime:
    if not isinstance(value, str) or not _FORM.fullmatch(value):
        raise ValueError("must be a time as in RFC 3339, such as 2026-11-22T21:04:05Z")
    time = datetime.fromisoformat(value.upper())
    if time < datetime.fromtimestamp(0, UTC):
        raise ValueError("must not be before 1970")
    return time


_SCHEMA: dict[str, Any] = {
    "type": "string",
    "format": "date-time",
    "examples": ["2026-11-22T21:04:05.250000Z"],
}

Timestamp = Annotated[
    datetime,
    BeforeValidator(_time_of),
    PlainSerializer(_written, return_type=str, when_used="json"),
    WithJsonSchema(_SCHEMA),
]
"""A time in an answer or event: RFC 3339, UTC, microseconds. Made of the Unix seconds of a bus contract."""
InputTime = Annotated[AwareDatetime, BeforeValidator(_read), WithJsonSchema(_SCHEMA)]
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


class PublicActivity(StrEnum):
    """What the user wants of the session, independent of its current phase."""

    WATCHING = "watching"
    PAUSED = "paused"
    IDLE = "idle"
    """No viewer has watched for `TURBOSERVE_IDLE_AFTER_S`."""
    ENDED = "ended"
    """The session has ended: it generates no video any more."""


def activity_of(record: SessionRecord) -> PublicActivity:
    """Return the activity of the row, which keeps its last value when the session ends."""
    if record.phase.ended:
        return PublicActivity.ENDED
    match record.activity:
        case Activity.WATCHING:
            return PublicActivity.WATCHING
        case Activity.PAUSED:
            return PublicActivity.PAUSED
        case Activity.IDLE:
            return PublicActivity.IDLE
