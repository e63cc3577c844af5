"""Times within which a frozen or silent process is replaced: the shipped ones, and short ones.

A frozen process keeps its connections, so only silence reveals it. Short times need a second instance of each
service, since a process that is merely slow is taken for frozen as well, and machines that schedule every
process several times a second.

The short times keep the order of the shipped ones: a worker's lease ends before the worker counts as dead, a
leader's before another process may lead, a transaction's before its caller gives up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from types import MappingProxyType


class Failover(StrEnum):
    """Which times detect failures."""

    PATIENT = "patient"
    """The default of each setting."""
    SHORT = "short"
    """`SHORT_TIMES`, except for settings that are set."""


SHORT_TIMES: Mapping[str, float] = MappingProxyType(
    {
        "broker_ping_s": 0.5,
        "request_deadline_s": 1.5,
        "transaction_deadline_s": 1.2,
        "heartbeat_s": 0.5,
        "lease_s": 2.0,
        "worker_timeout_s": 3.0,
        "leader_renew_s": 0.25,
        "leader_lease_s": 2.0,
        "leader_timeout_s": 2.5,
        "store_lead_timeout_s": 2.0,
    }
)
"""Setting → its value with `Failover.SHORT`, seconds. A service applies those that it declares."""


def apply(values: Mapping[str, object], declared: Collection[str]) -> dict[str, object]:
    """Return `values`. With short failover, `declared` settings that are not set get their short times."""
    if values.get("failover") != Failover.SHORT:
        return dict(values)
    return {name: value for name, value in SHORT_TIMES.items() if name in declared} | dict(values)
