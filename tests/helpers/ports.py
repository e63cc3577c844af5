"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

from turboserve.free_ports import any_free


def free_ports(count: int) -> list[int]:
    """Return different loopback ports that are free now."""
    found: set[int] = set()
    while len(found) < count:
        found.add(any_free())
    return list(found)
