"""Types of what clients get: in answers of the gateway, in events and in webhooks. Times are in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from turboserve.contracts.sessions import Activity, SessionRecord

_LATEST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
_LATEST_S = _LATEST.timestamp()
_SECONDS = (int, float)
TIME_SCHEMA: dict[str, Any] = {
    "type": "string",
    "format": "date-time",
    "examples": ["2026-11-22T21:04:05.250000Z"],
}


class PublicOutput(BaseModel):
    """Base of all objects in answers. Fields of a bus contract that are not declared here are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class PublicMessage(PublicOutput):
    """Base of the events and messages of a stream."""

    def text(self) -> str:
        """Return the message as JSON, without the members that are null."""
        # The same as `model_dump_json`, without its twenty arguments.
        return self.__pydantic_serializer__.to_json(self, exclude_none=True).decode()


def timestamp(unix_s: float) -> datetime:
    """Convert Unix seconds. Times after the year 9999, which RFC 3339 cannot express, become its last one."""
    return datetime.fromtimestamp(unix_s, UTC) if unix_s < _LATEST_S else _LATEST


def _time_of(value: object) -> object:
    return timestamp(value) if isinstance(value, _SECONDS) else value


def _written(time: datetime) -> str:
    utc = time if time.tzinfo is UTC else time.astimezone(UTC)
    return f"{utc.isoformat(timespec='microseconds').removesuffix('+00:00')}Z"


def written(unix_s: float) -> str:
    """Return Unix seconds as clients read times: RFC 3339, UTC, microseconds."""
    return _written(timestamp(unix_s))


Timestamp = Annotated[
    datetime,
    BeforeValidator(_time_of),
    PlainSerializer(_written, return_type=str, when_used="json"),
    WithJsonSchema(TIME_SCHEMA),
]
"""A time in an answer or event: RFC 3339, UTC, microseconds. Made of the Unix seconds of a bus contract."""


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
