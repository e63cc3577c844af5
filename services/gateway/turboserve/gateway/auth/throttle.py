"""Limits how many wrong keys one address may send. Pure: the caller passes the time."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from cachetools import FIFOCache

MINUTE_S = 60.0
ADDRESSES_LIMIT = 10_000


@dataclass
class _Bucket:
    tokens: float
    at_s: float


class FailureThrottle:
    """A token bucket for each address: `per_minute` failures at once, refilled at that rate.

    At most `addresses_limit` addresses are remembered; the one that failed longest ago is forgotten first.
    """

    def __init__(self, per_minute: int, addresses_limit: int = ADDRESSES_LIMIT) -> None:
        self._per_minute = per_minute
        self._buckets: FIFOCache[str, _Bucket] = FIFOCache(addresses_limit)

    def __len__(self) -> int:
        return len(self._buckets)

    def failed(self, address: str, now_s: float) -> float | None:
        """Count a failure. Returns None within the limit, else the seconds until another one is allowed."""
        bucket = self._buckets.get(address) or _Bucket(float(self._per_minute), now_s)
        self._buckets[address] = bucket
        refilled = bucket.tokens + max(0.0, now_s - bucket.at_s) * self._per_minute / MINUTE_S
        bucket.tokens, bucket.at_s = min(float(self._per_minute), refilled), now_s
        if bucket.tokens >= 1.0:
            bucket.tokens -= 1.0
            return None
        return (1.0 - bucket.tokens) * MINUTE_S / self._per_minute


class LogBudget:
    """Limits the log lines about failures to `per_minute`, and counts failures without a line."""

    def __init__(self, per_minute: int) -> None:
        self._throttle = FailureThrottle(per_minute, 1)
        self._left_out = 0

    def take(self, now_s: float) -> int | None:
        """Return the number of failures without a line since the last one; None if no line is allowed now."""
        if self._throttle.failed("", now_s) is not None:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return left_out


def network_of(address: str | None) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 of an IPv6 address.

    One host may have a whole /64.
    """
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return address or "unknown"
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
