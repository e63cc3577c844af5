"""Schemas of usage."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Self

from pydantic import Field

from turboserve.contracts import usage as contract
from turboserve.gateway.public import PublicOutput

EPOCH = date(1970, 1, 1)


def number_of(day: date) -> int:
    """Return the days since 1 January 1970."""
    return (day - EPOCH).days


class UsageDay(PublicOutput):
    """What the sessions of one tenant that one key created have used in one day of UTC."""

    day: date = Field(description="The day, of UTC.", examples=["2026-11-24"])
    tenant: str = Field(description="The tenant.", examples=["acme"])
    key: str | None = Field(
        description="Id of the API key that created the sessions. `null`: sessions that no key created.",
        examples=["2d06c5c4a1b2c3d4"],
    )
    gpu_seconds: float = Field(
        description="The sessions' shares of the GPU-seconds of their workers.", examples=[5_321.5]
    )
    money: float = Field(description="The shares in `currency`, without corrections.", examples=[5.91])
    chunks: int = Field(description="Chunks that were generated.", examples=[7_095])
    viewer_seconds: float = Field(
        description="Time of all viewers together, as gateways have reported it.", examples=[10_642.0]
    )

    @classmethod
    def of(cls, used: contract.UsageDay) -> Self:
        return cls.model_validate({**used.model_dump(), "day": EPOCH + timedelta(days=used.day)})


class UsageList(PublicOutput):
    """A page of usage, oldest day first."""

    usage: list[UsageDay] = Field(description="One entry for each day, tenant and key with any use.")
    currency: str = Field(description="Currency of `money`.", examples=["USD"])
    next: str | None = Field(
        description="Value of `after` for the next page. `null`: this is the last page.",
        examples=["20781.acme.2d06c5c4a1b2c3d4"],
    )

    @classmethod
    def of(cls, page: contract.UsagePage) -> Self:
        return cls(usage=[UsageDay.of(day) for day in page.days], currency=page.currency, next=page.next)
