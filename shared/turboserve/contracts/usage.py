"""What tenants have used, by day or hour and by model, and the requests of gateways about it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Text

DAYS_LIMIT = 10_000_000
"""Upper bound of a day's number."""
HOURS = 24
HOURS_LIMIT = HOURS * DAYS_LIMIT + HOURS - 1
"""Upper bound of an hour's number."""


class UsageDimension(StrEnum):
    """By what usage may be summed."""

    DAY = "day"
    HOUR = "hour"
    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"


BY_DAY = (UsageDimension.DAY, UsageDimension.TENANT, UsageDimension.KEY)
"""Dimensions of `UsageDay`."""


class UsageDay(Contract):
    """What the sessions of one tenant that one key created have used in one day of UTC."""

    day: int = Field(ge=0, le=DAYS_LIMIT)
    """Days since 1 January 1970."""
    tenant: Id
    key: Id | None = None
    """None: sessions that no key created."""
    gpu_seconds: float = Field(ge=0)
    """The sessions' shares of the time of their workers."""
    money: float = Field(ge=0)
    chunks: Count
    """Chunks that the log has accepted."""
    video_seconds: float = Field(default=0.0, ge=0)
    """Playing time of these chunks."""
    viewer_seconds: float = Field(ge=0)
    """Time of all viewers together, connected and not paused, as the gateways have reported it."""
    delivered_bytes: Count = 0
    """Video that gateways have sent to viewers, as they have reported it."""


class UsageGroup(Contract):
    """The sum of usage over the dimensions that a request does not name."""

    day: int | None = Field(default=None, ge=0, le=DAYS_LIMIT)
    """None: over all days of the request. `hour`, `tenant`, `key` and `model`: likewise."""
    hour: int | None = Field(default=None, ge=0, le=HOURS_LIMIT)
    """Hours since 1 January 1970. Use that was counted before hours were kept stands in the first one of its
    day."""
    tenant: Id | None = None
    key: Id | None = None
    """None also in a sum by key: sessions that no key created."""
    model: Id | None = None
    """The class of the sessions: the model, with the frame size where that is not the model's own. None also
    in a sum by model: use that was counted before models were kept."""
    gpu_seconds: float = Field(ge=0)
    money: float = Field(ge=0)
    chunks: Count
    video_seconds: float = Field(ge=0)
    viewer_seconds: float = Field(ge=0)
    delivered_bytes: Count


class ListUsage(Contract):
    """gateway → state store: list usage, oldest day first. Answered with `UsagePage`."""

    tenant: Id | None = None
    """None: all tenants."""
    from_day: int = Field(ge=0, le=DAYS_LIMIT)
    to_day: int = Field(ge=0, le=DAYS_LIMIT)
    """The last day."""
    limit: int = Field(default=1_000, ge=1, le=2_000)
    after: Text | None = None
    """The `next` of the previous page."""
    group_by: tuple[UsageDimension, ...] = Field(default=(), max_length=len(UsageDimension))
    """The answer has `groups`, with one sum for each combination of these. Empty: it has `days`."""


class UsagePage(Contract):
    """One page of usage. `next` None: the last page."""

    days: tuple[UsageDay, ...]
    groups: tuple[UsageGroup, ...] = ()
    """Sums, if the request has `group_by`. A state store of an earlier version sends none."""
    next: Text | None = None
    currency: Text = ""
