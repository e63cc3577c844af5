"""Faults that slow a stack down instead of breaking it: what they hit, how, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from turboserve.experiments.chaos.network_proxy import NetworkConditions
from turboserve.experiments.chaos.slow_disk import DiskConditions

NETWORKS: Mapping[str, NetworkConditions] = MappingProxyType(
    {
        "delayed": NetworkConditions(delay_s=0.05, jitter_s=0.1),
        "far": NetworkConditions(delay_s=0.4, jitter_s=0.2),
        "thin": NetworkConditions(bytes_per_s=20_000),
        "lossy": NetworkConditions(lifetime_s=3.0),
        "mute": NetworkConditions(stops_requests=True),
        "deaf": NetworkConditions(stops_answers=True),
        "silent": NetworkConditions(stops_requests=True, stops_answers=True),
        "refused": NetworkConditions(lifetime_s=0.5, refuses=True),
    }
)
"""Name → conditions of a slow network."""
DISKS: Mapping[str, DiskConditions] = MappingProxyType(
    {
        "slow": DiskConditions(write_s=0.005, sync_s=0.1),
        "crawling": DiskConditions(write_s=0.05, sync_s=1.0),
        "hanging": DiskConditions(write_s=5.0, sync_s=5.0),
    }
)
"""Name → conditions of a slow disk."""
BEHIND = NetworkConditions(bytes_per_s=500)
"""Less than what any service reads: its view of the others grows older for as long as this lasts."""

SERVICE_LINKS = tuple(
    f"{service}-nats"
    for service in ("state-store", "scheduler", "autoscaler", "recorder", "gateway", "workers")
)
LINKS = (*SERVICE_LINKS, "state-store-postgres", "state-store-redis", "viewers")
"""The links of `StackNetwork`."""
SECOND = ("gateway", "scheduler", "state-store", "autoscaler")
"""Services of which a stack with redundancy has a second process."""
SECOND_SERVICE_LINKS = tuple(f"{service}-2-nats" for service in SECOND)
SECOND_LINKS = (*SECOND_SERVICE_LINKS, "state-store-2-postgres", "state-store-2-redis", "viewers-2")
"""The links that a stack with redundancy has besides."""
SLOW_DISKS = ("nats", "postgres", "redis", "recorder")
"""Whose disk is slow: each writes to the data folder."""

NETWORK_TARGETS = tuple(f"{link} {name}" for link in LINKS for name in NETWORKS)
SECOND_NETWORK_TARGETS = tuple(f"{link} {name}" for link in SECOND_LINKS for name in NETWORKS)
DISK_TARGETS = tuple(f"{owner} {name}" for owner in SLOW_DISKS for name in DISKS)
