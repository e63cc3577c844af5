"""What tenants have used, by day, and the requests of gateways about it."""

from __future__ import annotations

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Text

DAYS_LIMIT = 10_000_000
"""Upper bound of a day's number."""


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
    viewer_seconds: float = Field(ge=0)
    """Time of all viewers together, connected and not paused, as the gateways have reported it."""


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


class UsagePage(Contract):
    """One page of usage. `next` None: the last page."""

    days: tuple[UsageDay, ...]
    next: Text | None = None
    currency: Text = ""
