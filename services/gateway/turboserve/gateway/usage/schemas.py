"""Schemas of usage."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from enum import StrEnum
from typing import Self

from pydantic import Field

from turboserve.contracts import usage as contract
from turboserve.gateway.public import PublicOutput, Timestamp, class_members

EPOCH = date(1970, 1, 1)


def number_of(day: date) -> int:
    """Return the days since 1 January 1970."""
    return (day - EPOCH).days


class UsageBucket(StrEnum):
    """The length of time of an entry."""

    HOUR = "hour"
    DAY = "day"


class UsageEntry(PublicOutput):
    """What was used in one day of UTC by the sessions of one tenant that one key created, or a sum of it.

    A member that `group_by` does not name is `null` in every entry.
    """

    day: date | None = Field(description="The day, of UTC.", examples=["2026-11-24"])
    tenant: str | None = Field(description="The tenant.", examples=["acme"])
    key: str | None = Field(
        description="Id of the API key that created the sessions. `null` also for sessions without a key.",
        examples=["2d06c5c4a1b2c3d4"],
    )
    gpu_seconds: float = Field(
        description="The sessions' shares of the GPU-seconds of their workers.", examples=[5_321.5]
    )
    money: float = Field(description="The shares in `currency`, without corrections.", examples=[5.91])
    chunks: int = Field(description="Chunks that were generated.", examples=[7_095])
    video_seconds: float = Field(description="Playing time of these chunks.", examples=[5_321.25])
    viewer_seconds: float = Field(
        description="Time of all viewers together, as gateways have reported it.", examples=[10_642.0]
    )
    delivered_bytes: int = Field(
        description="Video that gateways have sent to viewers, as they have reported it.",
        examples=[1_338_200_000],
    )
    hour: Timestamp | None = Field(
        description="When the hour began. `null`: the entry is not one of an hour.",
        examples=["2026-11-24T13:00:00.000000Z"],
    )
    model: str | None = Field(
        description="Model of the sessions. `null`: the entry is not one of a model, or was counted before "
        "models were.",
        examples=["toyworld"],
    )
    width: int | None = Field(
        description="Width of their frames, pixels. `null`: the model's own.", examples=[None]
    )
    height: int | None = Field(description="Height of their frames, pixels: see `width`.", examples=[None])

    @classmethod
    def of(cls, used: contract.UsageDay | contract.UsageGroup) -> Self:
        group = used if isinstance(used, contract.UsageGroup) else None
        members = used.model_dump() | class_members(None if group is None else group.model)
        members["day"] = None if used.day is None else EPOCH + timedelta(days=used.day)
        members["hour"] = None if group is None or group.hour is None else 3_600.0 * group.hour
        return cls.model_validate(members)


def entries_of(page: contract.UsagePage) -> list[UsageEntry]:
    """Return the entries of a page, whether it has days or sums."""
    return [*map(UsageEntry.of, page.days), *map(UsageEntry.of, page.groups)]


class UsageList(PublicOutput):
    """A page of usage, oldest day first."""

    usage: list[UsageEntry] = Field(
        description="One entry for each day, tenant and key with any use, or for each combination of what "
        "`group_by` and `by` name."
    )
    group_by: list[contract.UsageDimension] = Field(
        description="By what the entries differ.", examples=[["day", "tenant"]]
    )
    currency: str = Field(description="Currency of `money`.", examples=["USD"])
    next: str | None = Field(
        description="Value of `after` for the next page. `null`: this is the last page.",
        examples=["20781.acme.2d06c5c4a1b2c3d4"],
    )

    @classmethod
    def of(cls, page: contract.UsagePage, group_by: Sequence[contract.UsageDimension]) -> Self:
        return cls(usage=entries_of(page), group_by=list(group_by), currency=page.currency, next=page.next)
