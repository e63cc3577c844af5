"""Decides which connections a server keeps: limits in total and per address, and which one to evict. No I/O.

A connection *waits* until its request is complete, and is *served* from then on. A waiting connection costs
its peer nothing. A full server therefore evicts the connection that has waited longest to admit a new one. A
served connection is never evicted.

A waiting connection is *idle* while nothing of a further request has come since an answer. An address at its
limit gives up its connection that has been idle longest, so idle connections keep no client out.
"""

from __future__ import annotations

import resource
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path

Network = IPv4Network | IPv6Network

IPV6_PREFIX_BITS = 64
"""The addresses of one IPv6 network of this prefix count as one: a host usually owns a whole /64."""


class ConnectionRefusal(StrEnum):
    """Why a connection is not admitted."""

    TOTAL = "total"
    """The server is at its limit, and serves all of its connections."""
    ADDRESS = "address"
    """The peer's address is at the limit of one address, and none of its connections is idle."""


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections a server keeps."""

    total: int
    per_address: int | None = None
    """Maximum of connections per address. None: no limit per address."""
    exempt: tuple[Network, ...] = ()
    """Networks whose addresses have no limit per address. Their connections still count in `total`."""


@dataclass(frozen=True)
class Admission:
    """The answer to a new connection: either `key` or `refusal` is set."""

    key: int | None = None
    """Identifies the connection in the other calls."""
    evicted: int | None = None
    """The connection to close now to make room."""
    refusal: ConnectionRefusal | None = None


class ConnectionTable:
    """The open connections of one server. Every method takes constant time."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._groups: dict[int, str] = {}
        """Connections that are admitted and not closed: key → group of the address."""
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._idle: dict[str, OrderedDict[int, None]] = {}
        """Group → its idle connections. They wait, too."""
        self._evicted: set[int] = set()
        self._per_group: Counter[str] = Counter()
        """Open connections by group, without the evicted ones."""
        self._newest = 0

    def __len__(self) -> int:
        """Number of open connections, without the evicted ones that are being closed."""
        return len(self._groups) - len(self._evicted)

    def admit(self, address: str) -> Admission:
        """Decide about a new connection from `address`. An admitted connection waits."""
        group, exempt = self._group(address)
        per_address = self._limits.per_address
        evicted = None
        if per_address is not None and not exempt and self._per_group[group] >= per_address:
            if group not in self._idle:
                return Admission(refusal=ConnectionRefusal.ADDRESS)
            evicted = next(iter(self._idle[group]))
        elif len(self) >= self._limits.total:
            if not self._waiting:
                return Admission(refusal=ConnectionRefusal.TOTAL)
            evicted = next(iter(self._waiting))
        if evicted is not None:
            self.serve(evicted)
            self._evicted.add(evicted)
            self._count(self._groups[evicted], -1)
        self._newest += 1
        self._groups[self._newest] = group
        self._count(group, 1)
        self._waiting[self._newest] = None
        return Admission(key=self._newest, evicted=evicted)

    def serve(self, key: int) -> None:
        """Mark the connection as served: its request is complete."""
        self._waiting.pop(key, None)
        self._leave_idle(key)

    def wait(self, key: int, *, idle: bool = False) -> None:
        """Mark the connection as waiting for its next request: it was answered.

        `idle`: nothing of that request has come.
        """
        if key not in self._groups or key in self._evicted:
            return
        self._waiting[key] = None
        self._waiting.move_to_end(key)
        self._leave_idle(key)
        if idle:
            self._idle.setdefault(self._groups[key], OrderedDict())[key] = None

    def close(self, key: int) -> None:
        """Forget the connection: it is closed. A second call does nothing."""
        if key not in self._groups:
            return
        self.serve(key)
        group = self._groups.pop(key)
        if key in self._evicted:
            self._evicted.discard(key)
        else:
            self._count(group, -1)

    def _leave_idle(self, key: int) -> None:
        group = self._groups.get(key, "")
        idle = self._idle.get(group)
        if idle is not None:
            idle.pop(key, None)
            if not idle:
                del self._idle[group]

    def _count(self, group: str, change: int) -> None:
        self._per_group[group] += change
        if not self._per_group[group]:
            del self._per_group[group]

    def _group(self, address: str) -> tuple[str, bool]:
        """Return the group that `address` counts in, and whether the address is exempt."""
        try:
            parsed = ip_address(address.partition("%")[0])
        except ValueError:
            return address, False
        if isinstance(parsed, IPv6Address):
            if parsed.ipv4_mapped is not None:
                parsed = parsed.ipv4_mapped
            elif not contains(self._limits.exempt, str(parsed)):
                return str(IPv6Network((int(parsed), IPV6_PREFIX_BITS), strict=False)), False
        return str(parsed), contains(self._limits.exempt, str(parsed))


def contains(networks: Sequence[Network], address: str) -> bool:
    """Whether `address` lies in one of `networks`. False if `address` is not an IP address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return  # Some systems report a hard limit that they do not grant.


def free_descriptors() -> int:
    """Return how many more descriptors this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return soft - sum(1 for _ in Path("/dev/fd").iterdir())
